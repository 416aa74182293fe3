"""White space between the parts of JSON: which a constraint allows.

JSON as programs write it has at each place nothing, one space, or one line break with an indentation. More than that
is JSON, too, and a model that begins with it often goes on to the end of its budget. So the indentation is limited to
what the levels of the schema need.
"""

from __future__ import annotations

from typing import Any

from ferrule.forms import GrammarSpec
from ferrule_plugins.guided_decoding.patterns import whitespace
from ferrule_plugins.guided_decoding.schemas import inner
from ferrule_plugins.guided_decoding.support import resolved

_WIDTH = 4  # spaces of one level of indentation, at most
_OPEN = 3  # levels of a value that the schema does not describe
_MOST = 8  # levels that are indented
_DEEPER = frozenset(
    (
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
    )
)
_BESIDE = frozenset(("allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas"))
_SCALARS = frozenset(("string", "number", "integer", "boolean", "null"))


def pattern(spec: GrammarSpec, schema: Any) -> str:
    """Return a regular expression of the white space at one place of JSON that follows the schema; empty for none.

    Raises ValueError for a pattern of the constraint that matches something else, too.
    """
    if not spec.any_whitespace:
        return ""
    if spec.whitespace_pattern is not None:
        return whitespace(spec.whitespace_pattern)
    if not spec.bounded_whitespace:
        return r"[ \n\r\t]*"
    spaces, tabs = indentation(schema)
    return rf"(?: |\n {{0,{spaces}}}|\n\t{{1,{tabs}}})?"


def indentation(schema: Any) -> tuple[int, int]:
    """Return how many spaces, and how many tabs, may follow a line break in JSON that follows the schema."""
    levels = _levels(schema, schema, _MOST, {})
    return _WIDTH * levels, max(1, levels)


def _levels(schema: Any, document: Any, most: int, known: dict[tuple[int, int], int]) -> int:
    """Count the objects and lists that are inside one another in values of a schema, as far as it says, up to
    `most`.
    """
    if not isinstance(schema, dict) or most == 0:
        return min(most, 0 if schema is False else _OPEN)
    key = (id(schema), most)
    if key not in known:
        known[key] = 0  # for a reference that leads back here
        found = [0, *(_OPEN for value in (*_listed(schema), schema.get("const")) if isinstance(value, dict | list))]
        for keyword, value in schema.items():
            if keyword in _DEEPER:
                found += [1 + _levels(part, document, most - 1, known) for part in inner(keyword, value)]
            elif keyword in _BESIDE:
                found += [_levels(part, document, most, known) for part in inner(keyword, value)]
            elif keyword == "$ref" and isinstance(value, str):
                found.append(_levels(_target(value, document), document, most, known))
        described = max(found) or {"enum", "const"} & set(schema) or _only_scalars(schema.get("type"))
        known[key] = min(most, max(found) if described else _OPEN)
    return known[key]


def _listed(schema: dict[str, Any]) -> list[Any]:
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def _only_scalars(types: Any) -> bool:
    return {types} <= _SCALARS if isinstance(types, str) else isinstance(types, list) and _SCALARS.issuperset(types)


def _target(reference: str, document: Any) -> Any:
    try:
        return resolved(reference, document)
    except ValueError:  # the backend says so
        return True
