"""What the JSON schema of a function's arguments says of each of them, for formats that are not JSON as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from msgspec import Struct

from ferrule.forms import Fixed, Form, OneOf, Repeated, Series

NOTES = frozenset(("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"))
_OBJECT = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_ELSEWHERE = ("$defs", "definitions")
_MOST = 1 << 20  # of anything that is counted
_MOST_ROOTS = 256  # schemas at the root of one, by references and combinations
_DEEPEST = 8  # references and combinations in one another, at the root
_MOST_OPTIONAL = 64  # arguments none of which must be there, with separators: the form grows with their square


class Argument(Struct, frozen=True):
    """One argument: its schema stands for itself (with the definitions that it refers to)."""

    name: str
    schema: dict[str, Any]
    required: bool


def arguments(schema: Mapping[str, Any]) -> tuple[Argument, ...] | None:
    """Return the arguments that an object schema names, required ones first. None when the schema demands more than
    named arguments.
    """
    if not set(schema) <= _OBJECT or schema.get("type", "object") != "object" or not _plain(schema):
        return None
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not set(required) <= set(properties):
        return None
    shared = definitions(schema)
    found = []
    for name, inner in properties.items():
        whole = {} if inner is True else inner
        if not isinstance(whole, dict):
            return None
        found.append(Argument(name, {**shared, **whole} if "$ref" in json.dumps(whole) else whole, name in required))
    return tuple(sorted(found, key=lambda one: not one.required))


def ways(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return plain object schemas of which arguments are to fit one: those that references and combinations at the root
    lead to.

    An empty list when this cannot be expressed so, or when an argument has other types in one of them.
    """
    shared = definitions(schema)
    found = _ways(schema, shared, 0) or []
    return [{**shared, **one} for one in found] if len(found) < 2 or _alike(found) else []


def others(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema of arguments that are not named, with the definitions that it refers to. None where there is
    none.
    """
    found = schema.get("additionalProperties")
    shared = definitions(schema)
    return {**shared, **found} if isinstance(found, dict) else None


def _ways(schema: Mapping[str, Any], shared: dict[str, Any], depth: int) -> list[dict[str, Any]] | None:
    own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", "anyOf", *_ELSEWHERE)}
    parts: list[Any] = [[_resolve({**shared, **schema})]] if "$ref" in schema else []
    parts += [[one] for one in schema.get("allOf", [])] if isinstance(schema.get("allOf", []), list) else [[None]]
    parts += [schema["anyOf"]] if "anyOf" in schema else []
    found: list[dict[str, Any]] = [own]
    for options in parts:
        plain = isinstance(options, list) and all(isinstance(one, dict) for one in options)
        each = [_ways(one, shared, depth + 1) for one in options] if plain and depth < _DEEPEST else [None]
        inner = [way for one in each for way in one or ()]
        both = [_both(one, other) for one in found for other in inner] if len(found) * len(inner) < _MOST_ROOTS else []
        found = [one for one in both if one is not None]
        if None in each or not found or len(found) < len(both):
            return None
    return found


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Return a schema that demands what two schemas demand. None where one closes what the other one names, or both
    describe a name.
    """
    named = [schema.get("properties", {}) for schema in (one, other)]
    required = [schema.get("required", []) for schema in (one, other)]
    well = all(isinstance(part, dict) for part in named) and all(isinstance(part, list) for part in required)
    if not well or not _agree(*named) or _closes(one, other) or _closes(other, one):
        return None
    found = {**one, **other, "properties": {**named[0], **named[1]}, "required": [*required[0], *required[1]]}
    return {key: value for key, value in found.items() if value or key not in ("properties", "required")}


def _closes(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether what one object says about names that it does not have concerns the other object."""
    said = one.get("additionalProperties", True) is not True
    names = set(_object(other, "properties")) - set(_object(one, "properties"))
    return said and (bool(names) or other.get("additionalProperties", True) != one["additionalProperties"] is not False)


def _agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the names that two objects share mean the same in both."""
    return all(value == other[name] for name, value in one.items() if name in other)


def _alike(schemas: list[dict[str, Any]]) -> bool:
    """Return whether each argument has the same types in all schemas, so that a text between tags can be read without
    knowing the other arguments.
    """
    kinds: dict[str, tuple[frozenset[str], bool]] = {}
    for schema in schemas:
        for name, value in _object(schema, "properties").items():
            inner = value if isinstance(value, dict) else {}
            found = types(inner), not {"minLength", "maxLength"}.isdisjoint(inner)
            if kinds.setdefault(name, found) != found:
                return False
    return True


def described(schema: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the schemas of the arguments that an object schema names, and the schema of all other arguments (None
    where it does not describe them).

    Names may be at the schema's root, or where the root leads: behind a reference, or in one of several schemas.
    """
    named: dict[str, list[dict[str, Any]]] = {}
    others: list[dict[str, Any]] = []
    for root in _roots(schema):
        for name, value in _object(root, "properties").items():
            named.setdefault(name, []).extend([value] if isinstance(value, dict) else [])
        rest = (*_object(root, "patternProperties").values(), root.get("additionalProperties"))
        others += [value for value in rest if isinstance(value, dict)]
    return {name: _either(values) or {} for name, values in named.items()}, _either(others)


def entries(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema of the entries of lists, looking where `described` looks. None where entries are not
    described.
    """
    found: list[Any] = []
    for root in _roots(schema):
        first = root.get("prefixItems")
        found += [*(first if isinstance(first, list) else ()), root.get("items")]
    return _either([one for one in found if isinstance(one, dict)])


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions that references in a schema point to."""
    return {key: schema[key] for key in _ELSEWHERE if key in schema}


def _roots(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and the schemas that its root leads to."""
    shared = definitions(schema)
    waiting, seen = [schema], 0
    while waiting and seen < _MOST_ROOTS:
        root, seen = waiting.pop(0), seen + 1
        yield root
        target = _resolve({**shared, **root}) if "$ref" in root else None
        combined = (root.get(key) for key in ("allOf", "anyOf", "oneOf"))
        inner = (one for options in combined if isinstance(options, list) for one in options)
        waiting += [one for one in (target, *inner) if isinstance(one, dict)]


def _either(schemas: list[dict[str, Any]]) -> dict[str, Any] | None:
    return {"anyOf": schemas} if len(schemas) > 1 else schemas[0] if schemas else None


def _object(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    found = schema.get(keyword)
    return found if isinstance(found, dict) else {}


def types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a value may have, as far as the schema states them plainly; empty when it does not."""
    if "$ref" in schema:
        target = _resolve(schema)
        return types(target) if target is not None else frozenset()
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(map(json_type, values)) if isinstance(values, list) else frozenset()
    if isinstance(schema.get("type"), str | list):
        stated = schema["type"]
        return frozenset([stated] if isinstance(stated, str) else [one for one in stated if isinstance(one, str)])
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list):
            shared = definitions(schema)
            each = [types({**shared, **option}) if isinstance(option, dict) else frozenset() for option in options]
            return frozenset[str]().union(*each) if all(each) else frozenset()
    return frozenset()


def listed(members: list[tuple[Form, bool]], separator: str) -> Form | None:
    """Return the form of members in order, with separators between those that are present. A member is optional where
    its bool is False.
    """
    if not separator:
        return Series(tuple(form if must else Repeated(form, "", 0, 1) for form, must in members))
    must = [form for form, needed in members if needed]
    may = [form for form, needed in members if not needed]
    parts = [part for form in must for part in (Fixed(separator), form)][1:]
    if must:
        behind = (Repeated(Series((Fixed(separator), form)), "", 0, 1) for form in may)
        return Series((*parts, *behind))
    if len(may) > _MOST_OPTIONAL:
        return None
    return OneOf((*_starts(may, separator), Fixed("")))


def options(schema: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the schemas of which a value fits one: the schema itself, or those of its anyOf. None for other
    combinations.
    """
    if "$ref" in schema:
        target = _resolve(schema) if keywords(schema) == {"$ref"} else None
        if target is None:
            return None
        schema = {**definitions(schema), **target}
    for key in ("anyOf", "oneOf"):
        if key in schema:
            alone = set(schema) - NOTES - set(_ELSEWHERE) <= {key}
            shared = definitions(schema)
            inner = schema[key]
            plain = alone and isinstance(inner, list) and all(isinstance(one, dict) for one in inner)
            return [{**shared, **one} for one in inner] if plain else None
    stated = schema.get("type")
    if isinstance(stated, list) and "enum" not in schema and "const" not in schema:
        return [{**schema, "type": one} for one in stated]
    return [schema]


def all_valid(values: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether all values of an enumeration have the type that the schema states beside it."""
    stated = schema.get("type")
    kinds = {stated} if isinstance(stated, str) else set(stated or ())
    found = map(json_type, values) if isinstance(values, list) and values else ["?"]
    return all(not kinds or one in kinds or (one == "integer" and "number" in kinds) for one in found)


def keywords(schema: Mapping[str, Any]) -> set[str]:
    """Return the keywords of a schema that demand something."""
    return set(schema) - NOTES - set(_ELSEWHERE)


def _starts(members: list[Form], separator: str) -> Iterator[Form]:
    for at, first in enumerate(members):
        behind = (Repeated(Series((Fixed(separator), form)), "", 0, 1) for form in members[at + 1 :])
        yield Series((first, *behind))


def _plain(schema: Mapping[str, Any]) -> bool:
    """Return whether all references in a schema point to its definitions, and each keyword read in this module has a
    value of the right type.
    """
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            target = part.get("$ref", "#/$defs/")
            known = isinstance(target, str) and target.startswith(("#/$defs/", "#/definitions/"))
            if not known or "$dynamicRef" in part or "$id" in part or not _well_formed(part):
                return False
            waiting += part.values()
    return True


def _well_formed(schema: dict[str, Any]) -> bool:
    """Return whether the keywords that this module reads have values of the right types.

    Properties may be named like keywords, so a valid schema with such names may be rejected.
    """
    numbers = [schema[key] for key in ("minLength", "maxLength", "minItems", "maxItems") if key in schema]
    names = [schema[key] for key in ("required", "type") if isinstance(schema.get(key), list)]
    return (
        all(isinstance(schema.get(key, {}), dict) for key in ("properties", *_ELSEWHERE))
        and all(isinstance(schema.get(key, []), list) for key in ("required", "enum", "anyOf", "oneOf"))
        and all(type(number) is int and 0 <= number < _MOST for number in numbers)
        and all(isinstance(name, str) for each in names for name in each)
    )


def _resolve(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the definition that a reference points to; None when there is none, or when it is another reference."""
    target = schema["$ref"]
    parts = target.split("/") if isinstance(target, str) else []
    if len(parts) != 3 or parts[0] != "#":
        return None
    shared = schema.get(parts[1])
    found = shared.get(unquote(parts[2]).replace("~1", "/").replace("~0", "~")) if isinstance(shared, dict) else None
    return found if isinstance(found, dict) and "$ref" not in found else None


def json_type(value: Any) -> str:
    """Return the JSON type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")
