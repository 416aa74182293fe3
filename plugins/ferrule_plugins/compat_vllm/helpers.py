"""Stand-ins for the functions that vLLM's parsers share: ``tool_parsers.utils``, ``chat_utils``, ``utils``."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ferrule_plugins.compat_vllm.protocol import random_uuid

PARTIAL_JSON = "partial_json_parser"
PARTIAL_JSON_HINT = "it needs the package partial-json-parser: pip install 'ferrule[compat-vllm]'"

# ------------------------------------------------------------------------------------------------ texts


def find_common_prefix(s1: str, s2: str) -> str:
    return os.path.commonprefix([s1, s2])


def find_common_suffix(s1: str, s2: str) -> str:
    """Return the longest common ending without letters and digits: of ``{"a": "b"}`` and ``{"a": "bc"}`` it is
    ``"}``.
    """
    length = 0
    while length < min(len(s1), len(s2)) and s1[-1 - length] == s2[-1 - length] and not s1[-1 - length].isalnum():
        length += 1
    return s1[len(s1) - length :]


def extract_intermediate_diff(curr: str, old: str) -> str:
    """Return the part of `curr` between the beginning and the ending that it shares with `old`."""
    suffix = find_common_suffix(curr, old)
    middle = curr.removesuffix(suffix)
    return middle[len(find_common_prefix(middle, old.removesuffix(suffix))) :]


def find_all_indices(string: str, substring: str) -> list[int]:
    return [at for at in range(len(string)) if string.startswith(substring, at)]


def consume_space(i: int, s: str) -> int:
    """Return the index of the first character of `s` from `i` on that is not white space."""
    while i < len(s) and s[i].isspace():
        i += 1
    return i


def partial_tag_overlap(text: str, tag: str) -> int:
    """Count the characters at the end of `text` that begin `tag`, which is not complete there."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)


# ------------------------------------------------------------------------------------------------ JSON


def is_complete_json(input_str: str) -> bool:
    try:
        json.loads(input_str)
    except ValueError:
        return False
    return True


def partial_json_loads(input_str: str, flags: Any) -> tuple[Any, int]:
    """Return (the value that a text begins with, the number of characters read). `flags` say what may be incomplete.

    Raises what `partial_json_parser` raises for a text that is not the beginning of JSON, ImportError without that
    library.
    """
    try:
        import partial_json_parser
    except ImportError as error:
        raise ImportError(f"partial_json_loads: {PARTIAL_JSON_HINT}") from error
    try:
        return partial_json_parser.loads(input_str, flags), len(input_str)
    except json.JSONDecodeError as error:
        if "Extra data" not in error.msg:
            raise
        return json.JSONDecoder().raw_decode(input_str)


def safe_literal_eval(text: str) -> Any:
    """Return the value of a Python literal. Raises ValueError or SyntaxError for anything else."""
    return ast.literal_eval(text)


# ------------------------------------------------------------------------------------------------ schemas


def find_tool_properties(tools: Iterable[Any] | None, tool_name: str) -> dict[str, Any]:
    """Return the parameters of a tool, by name; empty for an unknown tool."""
    for tool in tools or ():
        if tool.function.name == tool_name:
            found: dict[str, Any] = (tool.function.parameters or {}).get("properties", {})
            return found
    return {}


def find_tool_name(tools: Iterable[Any] | None, tool_name: str) -> bool:
    return any(tool.function.name == tool_name for tool in tools or ())


def extract_types_from_schema(schema: Any) -> list[str]:
    """Return the names of the JSON types that a schema allows, in its order; ``["string"]`` when it does not say."""
    return list(dict.fromkeys(_types(schema))) or ["string"]


def _types(schema: Any) -> Iterable[str]:
    if not isinstance(schema, Mapping):
        return
    stated = schema.get("type")
    if stated is not None:
        yield from [stated] if isinstance(stated, str) else stated
    else:
        yield from map(_type_of, schema.get("enum", ()))
    for word in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(word, ()):
            yield from _types(inner)


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "string")


def coerce_to_schema_type(value: str, schema_type: str | Sequence[str]) -> Any:
    """Return `value` as the first of the types that it can be read as; the text itself when there is none."""
    allowed = {schema_type} if isinstance(schema_type, str) else set(schema_type)
    for name in ("null", "integer", "number", "boolean", "object", "array"):
        if name in allowed:
            try:
                return _READ[name](value)
            except ValueError:
                continue
    return value


def _constant(values: Mapping[str, Any], value: str) -> Any:
    word = value.strip().lower()
    if word not in values:
        raise ValueError(value)
    return values[word]


def _number(value: str) -> int | float:
    """Read a number, as an integer where the value is one. Raises ValueError, also for NaN and Infinity, which JSON
    does not have.
    """
    read = float(value)
    if read - read != 0:
        raise ValueError(value)
    return int(read) if read.is_integer() else read


def _collection(kind: type, value: str) -> Any:
    read = json.loads(value)
    if not isinstance(read, kind):
        raise ValueError(value)
    return read


_READ: Mapping[str, Any] = {
    "null": lambda value: _constant({"null": None, "none": None}, value),
    "integer": int,
    "number": _number,
    "boolean": lambda value: _constant({"true": True, "1": True, "false": False, "0": False}, value),
    "object": lambda value: _collection(dict, value),
    "array": lambda value: _collection(list, value),
}


# ------------------------------------------------------------------------------------------------ others


def is_list_of(value: object, typ: type | tuple[type, ...], *, check: str = "first") -> bool:
    """Return whether `value` is a list whose first element, or each one with ``check="all"``, is of a type."""
    if not isinstance(value, list):
        return False
    return all(isinstance(one, typ) for one in (value if check == "all" else value[:1]))


def is_mistral_tokenizer(obj: object) -> bool:
    """Return False: Ferrule's tokenizers are not of mistral_common."""
    return False


def make_tool_call_id(id_type: str = "random", func_name: str | None = None, idx: int | None = None) -> str:
    """Make a new id; of the type `kimi_k2`, the function and number of the call, which its template reads."""
    return f"functions.{func_name}:{idx}" if id_type == "kimi_k2" else f"chatcmpl-tool-{random_uuid()}"


def random_tool_call_id() -> str:
    return make_tool_call_id()
