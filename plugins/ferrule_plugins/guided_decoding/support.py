"""Which keywords of JSON schemas a library enforces; everything else is refused.

A list of what works is safe where a list of what fails is not: a keyword that nobody thought of is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from msgspec import Struct

from ferrule_plugins.guided_decoding.patterns import FORMATS, UnsupportedPattern, json_text
from ferrule_plugins.guided_decoding.schemas import parts, subschemas

# Keywords that only make a claim about values of one type.
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": (
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains"),
    ),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"),
        *("maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    ),
}
_TYPE_OF = {keyword: name for name, keywords in _OF_TYPE.items() for keyword in keywords}
_ANY_TYPE = (
    *("type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    *(
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "$id",
        "id",
        "$anchor",
        "$dynamicAnchor",
        "$recursiveAnchor",
        "$vocabulary",
    ),
)
# Every keyword that says which values are valid. All others are annotations, or are unknown and mean nothing.
CLAIMS = frozenset((*_ANY_TYPE, *_TYPE_OF))
TYPES = frozenset(("string", "number", "integer", "array", "object", "boolean", "null"))
_DIALECTS = re.compile(r"https?://json-schema\.org/(draft-07|draft/2019-09|draft/2020-12)/schema#?")

Check = Callable[[dict[str, Any]], str | None]


class Support(Struct, frozen=True):
    """A library's support of JSON schemas. `keywords` are enforced together. Those of `alone` are enforced where no
    other claim stands beside them.

    `checks` find what is not enforced in a schema whose keywords are; each is given one schema.
    """

    keywords: frozenset[str]
    alone: frozenset[str]
    checks: tuple[Check, ...] = ()
    any_value: bool = True  # whether a schema that is just true is enforced

    def refused(self, document: Any) -> str | None:
        """Return the first thing in a schema that is not enforced. Raises ValueError for a schema that is wrong."""
        for schema in subschemas(document):
            found = self._refused(schema, schema is document) or _reference(schema, document)
            if found:
                return found
        return None

    def _refused(self, schema: Any, root: bool) -> str | None:
        if not isinstance(schema, dict):
            return "a schema for values of any type" if root and not self.any_value else None
        if not _DIALECTS.fullmatch(str(schema.get("$schema", "http://json-schema.org/draft-07/schema"))):
            return f"dialect {schema['$schema']!r:.80}"
        claims = CLAIMS.intersection(schema) - ({"$id"} if root else set())
        for keyword in schema:
            if keyword in claims and keyword not in self.keywords | self.alone:
                return f"keyword {keyword}"
        for keyword in sorted(self.alone & claims):
            if beside := sorted(claims - {keyword}):
                return f"keyword {beside[0]} beside {keyword}"
        types = type_names(schema)
        for keyword in sorted(claims):
            wanted = _TYPE_OF.get(keyword)
            if wanted and wanted not in types and not (wanted == "number" and "integer" in types):
                return f"keyword {keyword} without type {wanted}"
        return next(filter(None, (check(schema) for check in self.checks)), None)


def type_names(schema: dict[str, Any]) -> tuple[str, ...]:
    """Return the types that a schema names. Raises ValueError."""
    found = schema.get("type", ())
    names = (found,) if isinstance(found, str) else tuple(found) if isinstance(found, list | tuple) else (found,)
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            raise ValueError(f"there is no type {name!r:.80}")
    if found == []:
        raise ValueError("no value satisfies an empty list of types")
    return names


def _reference(schema: Any, document: Any) -> str | None:
    """Refuse references that lead out of the document, or not to a schema. Raises ValueError."""
    target = schema.get("$ref") if isinstance(schema, dict) else None
    if target is None:
        return None
    if not isinstance(target, str):
        raise ValueError("$ref is not a string")
    if target != "#" and not target.startswith("#/"):
        return f"$ref {target!r:.80} to another document or a name"
    found = resolved(target, document)
    if not any(found is inner for inner in subschemas(document)):
        return f"$ref {target!r:.80} to something that is not in the place of a schema"
    return None


def resolved(reference: str, document: Any) -> Any:
    """Return what a JSON pointer in a URI's fragment leads to. Raises ValueError."""
    found = document
    for part in map(unquote, reference.split("/")[1:]):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            raise ValueError(f"$ref {reference!r:.80} leads nowhere")
    return found


def circular(document: Any) -> str | None:
    """Refuse references that lead into a schema that they are in; for libraries that follow references to some depth
    only.
    """
    inside: dict[str, set[str]] = {}
    waiting = _references(document)
    while waiting:
        reference = waiting.pop()
        if reference not in inside:
            inside[reference] = _references(resolved(reference, document))
            waiting |= inside[reference]
    for reference in inside:
        seen, waiting = set(), set(inside[reference])
        while waiting:
            found = waiting.pop()
            if found == reference:
                return f"$ref {reference!r:.80} to a schema that it is in"
            if found not in seen:
                seen.add(found)
                waiting |= inside[found]
    return None


def _references(schema: Any) -> set[str]:
    return {inner["$ref"] for inner in parts(schema) if "$ref" in inner}


# ------------------------------------------------------------------------------------------------ checks


def plain_references(schema: dict[str, Any]) -> str | None:
    """Refuse references with escaped characters, for libraries that do not decode references."""
    target = schema.get("$ref", "")
    return f"$ref {target!r:.80} with escaped characters" if "~" in target or "%" in target else None


def plain_values(schema: dict[str, Any]) -> str | None:
    """Refuse `enum` and `const` with objects and lists, which could be written in many ways."""
    for keyword in ("enum", "const"):
        values = schema.get(keyword, ()) if keyword == "enum" else (schema[keyword],) if keyword in schema else ()
        if not isinstance(values, list | tuple) or ("enum" in schema and not schema["enum"]):
            raise ValueError("enum is not a list with an entry")
        if any(isinstance(value, dict | list) for value in values):
            return f"{keyword} with an object or a list"
    return None


def disjoint_options(schema: dict[str, Any]) -> str | None:
    """Refuse `oneOf` unless its options can be told apart by their types, or by a property that all of them fix."""
    options = schema.get("oneOf", [])
    if [] in (schema.get("anyOf"), schema.get("oneOf")):
        raise ValueError("anyOf or oneOf without an option")
    for number, first in enumerate(options):
        for second in options[:number]:
            if not _disjoint(first, second):
                return "oneOf with options that may overlap"
    return None


def _disjoint(first: Any, second: Any) -> bool:
    if not isinstance(first, dict) or not isinstance(second, dict):
        return first is False or second is False
    mine, yours = _fixed(first), _fixed(second)
    if mine is not None and yours is not None:
        return not any(_same(a, b) for a in mine for b in yours)
    types, others = _kinds(first), _kinds(second)
    if types is not None and others is not None and not types & others:
        return True
    return (types == others == {"object"}) and any(
        name in _required(first) and name in _required(second) and _disjoint(value, second["properties"].get(name))
        for name, value in first.get("properties", {}).items()
        if isinstance(second.get("properties"), dict)
    )


def _fixed(schema: dict[str, Any]) -> list[Any] | None:
    """Return all values that a schema may have, where it lists them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _kinds(schema: dict[str, Any]) -> set[str] | None:
    fixed = _fixed(schema)
    if fixed is not None:
        return {_kind(value) for value in fixed}
    return {"number" if name == "integer" else name for name in type_names(schema)} or None


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def _same(first: Any, second: Any) -> bool:
    return _kind(first) == _kind(second) and bool(first == second)


def _required(schema: dict[str, Any]) -> list[Any]:
    found = schema.get("required", [])
    return found if isinstance(found, list) else []


def named_required(schema: dict[str, Any]) -> str | None:
    """Refuse `required` properties that `properties` does not name."""
    for name in _required(schema):
        if name not in schema.get("properties", {}):
            return f"required property {name!r:.80} that properties does not have"
    return None


def matching_types(schema: dict[str, Any]) -> str | None:
    """Refuse `enum` or `const` beside a `type` that not all values have, or beside other keywords."""
    fixed, types = _fixed(schema), type_names(schema)
    if fixed is None:
        return None
    if beside := sorted(CLAIMS.intersection(schema) - {"type", "const" if "const" in schema else "enum", "$id"}):
        return f"keyword {beside[0]} beside enum or const"
    if not types:
        return None
    for value in fixed:
        integer = _kind(value) == "number" and float(value).is_integer() and "integer" in types
        if _kind(value) not in types and not integer:
            return f"value {value!r:.80} that is not of the type beside it"
    return None


def string_pattern(schema: dict[str, Any]) -> str | None:
    """Return the pattern that the characters of a string match as a whole, by its format or its pattern."""
    if "format" in schema:
        return FORMATS[schema["format"]]
    return json_text(schema["pattern"]) if "pattern" in schema else None


def whole_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema for libraries that match whole strings where JSON Schema finds a pattern in them."""
    pattern = string_pattern(schema)
    rest = {keyword: value for keyword, value in schema.items() if keyword not in ("format", "pattern")}
    return schema if pattern is None else {**rest, "pattern": f"^(?:{pattern})$"}


def plain_names(schema: dict[str, Any]) -> str | None:
    """Refuse names of properties that can be written in several ways, where other properties may stand beside them."""
    if schema.get("additionalProperties") is False:
        return None
    for name in schema.get("properties", {}):
        if not name or "/" in name or json.dumps(name, ensure_ascii=False) != f'"{name}"':
            return f"property {name!r:.80} beside others that are not named"
    return None


def unique_count(schema: dict[str, Any]) -> str | None:
    """Refuse `minProperties` where a property might come twice."""
    if "minProperties" in schema and schema.get("additionalProperties") is not False:
        return "keyword minProperties with properties that are not named"
    return None


def exact_formats(schema: dict[str, Any]) -> str | None:
    """Refuse a `format` that there is no pattern for."""
    found = schema.get("format", "date")
    return None if isinstance(found, str) and found in FORMATS else f"format {found!r:.80}"


def finite_patterns(schema: dict[str, Any]) -> str | None:
    """Refuse a `pattern` that is not a regular expression in the narrow sense, or has a length beside it."""
    found = {"pattern", "format"}.intersection(schema)
    if not found:
        return None
    if beside := {"minLength", "maxLength", "pattern", "format"}.intersection(schema) - {min(found)}:
        return f"keyword {min(beside)} beside {min(found)}"
    if not isinstance(schema.get("pattern", ""), str):
        raise ValueError("pattern is not a string")
    try:
        json_text(schema.get("pattern", ""))
    except UnsupportedPattern as error:
        return str(error)
    return None


def exact_numbers(schema: dict[str, Any], most: int) -> str | None:
    """Refuse integers above `most`, for libraries that read them with rounding errors; as bounds of numbers, above
    2^53.
    """
    for keyword in ("const", "enum"):
        if not all(abs(value) <= most for value in _integers(schema.get(keyword))):
            return f"an integer of more than {most.bit_length()} bits in {keyword}"
    bounds = most if type_names(schema) == ("integer",) else 1 << 53
    for keyword in (*_OF_TYPE["number"],):
        for value in _integers(schema.get(keyword)):
            if abs(value) > bounds:
                return f"keyword {keyword} with an integer of more than {bounds.bit_length()} bits"
    return None


def _integers(value: Any) -> Iterator[int]:
    """Yield the integers in a JSON value."""
    if isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _integers(inner)
    elif type(value) is int:
        yield value


def ordered_bounds(schema: dict[str, Any]) -> str | None:
    """Compare least and greatest lengths, which some libraries do not do. Raises ValueError where they contradict each
    other.
    """
    for least, most in (("minLength", "maxLength"), ("minItems", "maxItems")):
        bounds = [schema[keyword] for keyword in (least, most) if keyword in schema]
        if any(type(bound) is not int or bound < 0 for bound in bounds):
            raise ValueError(f"{least} or {most} is not a count")
        if bounds != sorted(bounds):
            raise ValueError(f"{least} is greater than {most}")
    return None


def said_type(schema: dict[str, Any]) -> str | None:
    """Refuse schemas for values of any type, for libraries that cannot write them, or not all of them."""
    if {"type", "enum", "const", "anyOf", "oneOf", "$ref"}.isdisjoint(schema):
        return "a schema for values of any type"
    inner = (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties"))
    if any(value is True for value in inner[:-1]) or inner[-1] is True:
        return "a schema for values of any type"
    return "a schema that is false" if any(value is False for value in inner[:-1]) else None


def simple_types(schema: dict[str, Any]) -> str | None:
    """Refuse several types where keywords say more about one of them."""
    if not isinstance(schema.get("type"), list):
        return None
    more = sorted(CLAIMS.intersection(schema) - {"type"})
    structured = {"object", "array"}.intersection(schema["type"])
    if more or structured:
        return f"{more[0] if more else structured.pop()} in a list of types"
    return None


def described_contents(schema: dict[str, Any]) -> str | None:
    """Refuse lists and objects of any contents, for libraries that do not write them, and ignore what is beside
    `properties`.
    """
    if schema.get("type") == "array" and not isinstance(schema.get("items"), dict):
        return "array without items"
    if schema.get("type") == "object":
        others = schema.get("additionalProperties")
        if "properties" not in schema and not isinstance(others, dict):
            return "object without properties"
        if "properties" in schema and isinstance(others, dict):
            return "keyword additionalProperties beside properties"
    return None
