"""What a request's tools and tool choice demand of the calls in its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

_ANY: dict[str, Any] = {"type": "object"}
_ROOT_ONLY = ("$schema", "$defs", "definitions")  # references to what these hold begin at the root


class EnforcedFunction(Struct, frozen=True):
    """A function that may be called, and the JSON schema of its arguments, which are an object."""

    name: str
    schema: dict[str, Any]


def enforced(tools: Sequence[dict[str, Any]], choice: str | dict[str, Any]) -> tuple[EnforcedFunction, ...]:
    """Return the functions that a constraint must know; none when there is nothing to enforce.

    The choice "required": all functions; an object that names one: that function; "auto": all, if one is strict, and
    the arguments of those that are not strict may be any object. Tools without a schema take no arguments when a call
    is enforced.
    """
    functions = [tool.get("function") or {} for tool in tools]
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        functions = [function for function in functions if function.get("name") == name]
    elif choice == "auto" and any(function.get("strict") for function in functions):
        functions = [{**one, "parameters": one.get("parameters") if one.get("strict") else _ANY} for one in functions]
    elif choice != "required":
        return ()
    return tuple(EnforcedFunction(one["name"], _object(one.get("parameters"))) for one in functions if one.get("name"))


def _object(schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return a schema of those values of `schema` that are objects."""
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    types = schema.get("type", "object")
    if types == "object" or (isinstance(types, list) and "object" in types):
        return {**schema, "type": "object"}
    root = {keyword: value for keyword, value in schema.items() if keyword in _ROOT_ONLY}
    rest = {keyword: value for keyword, value in schema.items() if keyword not in _ROOT_ONLY}
    return {**root, "type": "object", "allOf": [rest]}
