"""What pydantic found wrong in a request, worded for a client: one sentence that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from ferrule.api.json_body import printable
from ferrule.errors import RequestError

_LONGEST = 1024  # characters of a message that pydantic or a model's author wrote

# pydantic's error types that say "of another JSON type" → what would be right
_TYPES: Mapping[str, str] = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "mapping_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dataclass_type": "an object",
    "none_required": "null",
}

Path = tuple[str | int, ...]


def explain(error: RequestValidationError) -> RequestError:
    """The first field at fault, at its deepest place: members of a union complain at several depths."""
    found = [(_path(finding, error.body), finding) for finding in error.errors()]
    first = found[0][0][:1]
    path = max((path for path, _ in found if path[:1] == first), key=len)
    findings = [finding for other, finding in found if other == path]
    param = printable(_joined(path), 128) or None
    return RequestError(_message(param, findings), param)


def _path(finding: Mapping[str, Any], body: Any) -> Path:
    """The place without the names of union members and validators, which pydantic puts between the fields."""
    source, *steps = finding["loc"]
    if source != "body":
        return tuple(steps[:1])
    path: list[str | int] = []
    value = body
    for place, step in enumerate(steps):
        last = place == len(steps) - 1
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            value = value[step]
        elif isinstance(step, str) and isinstance(value, dict) and step in value:
            value = value[step]
        elif not (last and finding["type"] in ("missing", "missing_argument")):
            continue
        path.append(step)
    return tuple(path)


def _joined(path: Path) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _message(param: str | None, findings: Sequence[Mapping[str, Any]]) -> str:
    name = param or "The body"
    others = [finding for finding in findings if finding["type"] not in _TYPES]
    if not others:
        wanted = " or ".join(dict.fromkeys(_TYPES[finding["type"]] for finding in findings))
        return f"{name} must be {wanted}, not {_kind(findings[0]['input'])}."
    if others[0]["type"] == "missing":
        return f"{name} is required."
    text = printable(str(others[0]["msg"]), _LONGEST).removesuffix(".")
    if text.startswith("Input should be "):
        return f"{name} must be {text.removeprefix('Input should be ')}."
    return f"{name}: {text.removeprefix('Value error, ').removeprefix('Assertion failed, ')}."


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "a string"
        case dict():
            return "an object"
        case _:
            return "a list"
