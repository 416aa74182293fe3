"""Translates pydantic's errors into our messages: the field's path, and what would be right. No value is repeated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ferrule.errors import RequestError, nearest
from ferrule.schema.keys import known_names, printable
from ferrule.schema.values import RULE

_KINDS = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "none_required": "null",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_GIVEN = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "must be at least {}"),
    "greater_than": ("gt", "must be greater than {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "less_than": ("lt", "must be less than {}"),
    "string_too_short": ("min_length", "must have at least {} characters"),
    "string_too_long": ("max_length", "may have at most {} characters"),
    "too_short": ("min_length", "must have at least {} entries"),
    "too_long": ("max_length", "may have at most {} entries"),
}
_LONGEST = 512  # characters of a message that is not ours
_QUOTED = re.compile("'([^']*)'")
_TAG = re.compile("<([^>]*)>")


def refusal_of(
    error: ValidationError | Sequence[Mapping[str, Any]], model: Any = None, *, under: str = "", given: Any = None
) -> RequestError:
    """Return the first problem as a RequestError whose `param` is the field's path, such as ``messages[0].content``.

    `error` may also be what FastAPI lists; the first step of each path, "body" or "query", is left out. `model` is what
    was to be made, for suggestions. Paths begin with `under`, the name of the value that was checked; a body has none.
    `given` is the value that was checked, where its model may have unions without a discriminator.
    """
    if isinstance(error, ValidationError):
        problems: Sequence[Mapping[str, Any]] = error.errors(include_url=False)
    else:
        problems = [{**problem, "loc": problem["loc"][1:]} for problem in error]
    if isinstance(given, dict):
        problems = _at_one_place(problems, given)
    # An unknown name explains a missing one.
    problem = next((found for found in problems if found["type"] == "extra_forbidden"), problems[0])
    path = path_of([*problem["loc"], *filter(None, [problem.get("ctx", {}).get("field")])], under)
    if problem["type"] == "extra_forbidden":
        name = str(problem["loc"][-1])
        return RequestError(f"There is no {path}.{nearest(name[:64], known_names(model))}", path)
    kinds = list(dict.fromkeys(_KINDS.get(other["type"], "") for other in problems))
    if isinstance(given, dict) and len(kinds) > 1 and all(kinds):
        return RequestError(f"{path or 'The body'} must be {' or '.join(kinds)}{_instead(problem)}.", path or None)
    return RequestError(f"{path or 'The body'} {_rule(problem)}", path or None)


def _at_one_place(problems: Sequence[Mapping[str, Any]], given: Any) -> Sequence[Mapping[str, Any]]:
    """Return the problems of the first field at fault at their deepest place: each member of a union has its own.

    Their paths lose the names of union members, which pydantic puts between the fields.
    """
    found = [{**problem, "loc": _walked(problem, given)} for problem in problems]
    first = found[0]["loc"][:1]
    deepest = max((problem["loc"] for problem in found if problem["loc"][:1] == first), key=len)
    return [problem for problem in found if problem["loc"] == deepest]


def _walked(problem: Mapping[str, Any], value: Any) -> tuple[str | int, ...]:
    """Return the steps of a path that lead somewhere in the value; a missing field is the last one."""
    path: list[str | int] = []
    *_, last = problem["loc"] or [None]
    for step in problem["loc"]:
        here = step in value if isinstance(value, dict) else isinstance(value, list) and step in range(len(value))
        if here:
            value = value[step]
        elif not (problem["type"] == "missing" and step is last):
            continue
        path.append(step)
    return tuple(path)


def path_of(steps: Sequence[int | str], under: str = "") -> str:
    """Write the steps of a path as text: ``("a", "<a list>", 2, "b")`` → ``a[2].b``."""
    path = under
    for step in steps:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            path += f".{printable(step)}" if path else printable(step)
    return path


def _rule(problem: Mapping[str, Any]) -> str:
    """Return the rest of the sentence that begins with the path: "must be …"."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == RULE:
        return f"{context['must']}."
    if kind == "missing":
        return "is required."
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}{'' if kind == 'finite_number' else _instead(problem)}."
    if kind in _BOUNDS:
        return _bound(kind, context)
    if kind == "union_tag_invalid":
        return f"must be {' or '.join(_TAG.findall(context.get('expected_tags', '')))}{_instead(problem)}."
    if kind == "literal_error":
        valid = _QUOTED.findall(context["expected"])
        if len(valid) == 1:
            return f"must be {valid[0]!r}."
        meant = nearest(problem["input"][:64], valid) if isinstance(problem["input"], str) else ""
        return f"must be one of {', '.join(map(repr, valid))}.{meant}"
    text = printable(str(problem["msg"]), _LONGEST).removesuffix(".")  # a validator's own, or pydantic's
    if text.startswith("Input should be "):
        return f"must be {text.removeprefix('Input should be ')}."
    return f"is not valid: {text.removeprefix('Value error, ').removeprefix('Assertion failed, ')}."


def _instead(problem: Mapping[str, Any]) -> str:
    given = _GIVEN.get(type(problem["input"]))
    return f", not {given}" if given is not None else ""


def _bound(kind: str, context: Mapping[str, Any]) -> str:
    key, words = _BOUNDS[kind]
    bound = context[key]
    if key == "min_length" and bound == 1:
        return "must not be empty."
    return f"{words.format(f'{bound:g}' if isinstance(bound, float) else bound)}."


def checked(adapter: TypeAdapter[Any], value: Any, name: str, model: Any = None) -> Any:
    """Return a value that goes by `name`, as `adapter` makes it; `model` is its type, for suggestions. Raises
    RequestError.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise refusal_of(error, model, under=name) from None
