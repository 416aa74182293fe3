"""Stand-ins for the functions of vLLM's parsers of calls that are written as Python, like ``[add(a=1, b=2)]``."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from ferrule_plugins.compat_vllm.protocol import DeltaFunctionCall, DeltaToolCall, FunctionCall, ToolCall

_CLOSING = {"(": ")", "[": "]", "{": "}"}
_NAMES = {"null": None, "true": True, "false": False}
_LITERALS = frozenset({*_NAMES, "True", "False", "None"})
_LAST_WORD = re.compile(r"[^\W\d]\w*\Z")
_LAST_PART = re.compile(r"[^,()\[\]{}]*\Z")


class UnexpectedAstError(Exception):
    """The error for a text that is Python, but not a call with literals."""


def get_parameter_value(val: ast.expr) -> Any:
    """Return the value of a literal; JSON's names count as literals. Raises UnexpectedAstError."""
    if isinstance(val, ast.Name) and val.id in _NAMES:
        return _NAMES[val.id]
    if isinstance(val, ast.Dict):
        keys = [get_parameter_value(key) if key is not None else None for key in val.keys]
        return dict(zip(keys, map(get_parameter_value, val.values), strict=True))
    if isinstance(val, ast.List | ast.Tuple | ast.Set):
        return [get_parameter_value(element) for element in val.elts]
    try:
        return ast.literal_eval(val)
    except (ValueError, TypeError):
        raise UnexpectedAstError("Tool call arguments must be literals") from None


def handle_single_tool(call: ast.Call) -> ToolCall:
    """Return the call of one expression. Raises UnexpectedAstError."""
    name = ast.unparse(call.func)
    if not all(part.isidentifier() for part in name.split(".")):
        raise UnexpectedAstError(f"{name} is not the name of a tool")
    arguments = {each.arg: get_parameter_value(each.value) for each in call.keywords}
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise UnexpectedAstError(f"the arguments of {name} are not JSON: {error}") from None
    return ToolCall(function=FunctionCall(name=name, arguments=text))


def make_valid_python(text: str) -> tuple[str, str] | None:
    """Return (text that can be parsed, what was appended) for the beginning of an expression.

    None while the beginning ends where nothing that is appended helps: in a name, or before a value. Raises
    UnexpectedAstError for brackets that do not match.
    """
    opened = _opened(text)
    inside = opened[-1] if opened else ""
    body = text.rstrip("\\") if inside in ("'", '"') else text.rstrip()
    if inside not in ("'", '"'):
        plain = _without_strings(body)
        last, word = _LAST_PART.search(plain), _LAST_WORD.search(plain)
        part = last[0].strip() if last is not None else ""
        if inside and word is not None and word[0] not in _LITERALS:
            return None
        if body.endswith(("=", ":")) or (inside == "(" and part and "=" not in part):
            return None
        if inside == "{" and part and ":" not in part:
            return None
        body = body.removesuffix(",")
    added = "".join(_CLOSING.get(one, one) for one in reversed(opened))
    try:
        ast.parse(body + added)
    except (SyntaxError, ValueError):
        return None
    return body + added, added


def compute_tool_delta(
    previously_sent_args: str, new_call: ToolCall, index: int, withheld_suffix: str
) -> DeltaToolCall | None:
    """Return the new part of a call whose text ends in `withheld_suffix`, which was only appended; None where nothing
    is new.
    """
    arguments = new_call.function.arguments
    if not arguments.endswith(withheld_suffix):
        raise ValueError(f"the arguments {arguments} do not end with {withheld_suffix}")
    arguments = arguments[: len(arguments) - len(withheld_suffix)]
    if not previously_sent_args:
        function = DeltaFunctionCall(name=new_call.function.name, arguments=arguments)
        return DeltaToolCall(id=new_call.id, type="function", index=index, function=function)
    new = arguments[len(previously_sent_args) :]
    return DeltaToolCall(index=index, function=DeltaFunctionCall(arguments=new)) if new else None


def _opened(text: str) -> list[str]:
    """Return the brackets and quotes that are open at the end."""
    opened: list[str] = []
    escaped = False
    for char in text:
        inside = opened[-1] if opened else ""
        if inside in ("'", '"'):
            if char == inside and not escaped:
                opened.pop()
            escaped = char == "\\" and not escaped
        elif char in ("'", '"') or char in _CLOSING:
            opened.append(char)
        elif char in _CLOSING.values():
            if _CLOSING.get(inside) != char:
                raise UnexpectedAstError(f"{char} closes nothing in {text!r}")
            opened.pop()
    return opened


def _without_strings(text: str) -> str:
    return re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "0", text)
