"""JSON schemas as backends share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

from msgspec import structs

from ferrule.forms import Form, OneOf, Repeated, Series, Tag, Triggered

# Keywords whose value is a schema, a list of schemas, or an object whose values are schemas (JSON Schema 2020-12).
_SCHEMA = frozenset(
    (
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "additionalItems", "unevaluatedItems"),
        *("items", "contains", "not", "if", "then", "else", "contentSchema"),
    )
)
_LIST = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_MAP = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))


def children(form: Form) -> tuple[Form, ...]:
    """Return the forms that a form is made of."""
    match form:
        case OneOf(options):
            return options
        case Series(parts):
            return parts
        case Repeated(part):
            return (part,)
        case Triggered(_, tags):
            return tuple(tag.content for tag in tags)
    return ()


def rests(form: Triggered) -> dict[str, list[Tag]]:
    """Return the tags of each trigger; their beginnings lack the trigger. Raises ValueError."""
    if form.most == 0:
        raise ValueError("a text without tags needs no trigger")
    found: dict[str, list[Tag]] = {trigger: [] for trigger in form.triggers}
    if any(other.startswith(trigger) for trigger, other in permutations(found, 2)):
        raise ValueError("a trigger begins with another one")
    for tag in form.tags:
        of = [trigger for trigger in found if tag.begin.startswith(trigger)]
        if not of:
            raise ValueError("a tag does not begin with a trigger")
        found[of[0]].append(structs.replace(tag, begin=tag.begin.removeprefix(of[0])))
    if not all(found.values()):
        raise ValueError("a trigger is not the beginning of a tag")
    return found


def walk(form: Form) -> Iterator[Form]:
    """Yield a form and every form in it."""
    yield form
    for child in children(form):
        yield from walk(child)


def subschemas(schema: Any) -> Iterator[Any]:
    """Yield a schema and everything in it that is a schema."""
    yield schema
    if isinstance(schema, dict):
        for keyword, value in schema.items():
            for part in inner(keyword, value):
                yield from subschemas(part)


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Return everything in a schema that is a schema and not just true or false."""
    return (inner for inner in subschemas(schema) if isinstance(inner, dict))


def closed(schema: Any) -> Any:
    """Return the schema, closed to properties that it does not name, where it names some and does not say otherwise."""
    return mapped(schema, _closed)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    said = {"additionalProperties", "unevaluatedProperties", "patternProperties"}.intersection(schema)
    return schema if said or "properties" not in schema else {**schema, "additionalProperties": False}


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return the schema with `change` made to everything in it that is a schema and an object, innermost first."""
    if not isinstance(schema, dict):
        return schema
    return change({keyword: _mapped(keyword, value, change) for keyword, value in schema.items()})


def inner(keyword: str, value: Any) -> list[Any]:
    """Return the schemas in the value of a keyword."""
    if keyword in _LIST and isinstance(value, list):
        return value
    if keyword in _MAP and isinstance(value, dict):
        return list(value.values())
    return [value] if keyword in _SCHEMA and isinstance(value, dict | bool) else []


def _mapped(keyword: str, value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if keyword in _LIST and isinstance(value, list):
        return [mapped(inner, change) for inner in value]
    if keyword in _MAP and isinstance(value, dict):
        return {name: mapped(inner, change) for name, inner in value.items()}
    return mapped(value, change) if keyword in _SCHEMA else value
