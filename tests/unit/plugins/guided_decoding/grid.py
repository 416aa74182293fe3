"""Keywords of JSON Schema (drafts 7 and 2020-12): schemas, with instances that are valid and invalid."""

from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    """A schema with instances. `others` are valid instances with properties or items that the schema does not
    describe.
    """

    schema: dict[str, Any] | bool
    valid: list[Any]
    invalid: list[Any]
    others: list[Any] = []


def obj(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    found = {"type": "object", "properties": properties, "additionalProperties": False, **more}
    return found if required is None else {**found, "required": required}


INT, STR = {"type": "integer"}, {"type": "string"}

GRID = (
    # types, and values that are listed
    Row(True, [None, 1, "a", [1, {"a": []}]], []),
    Row({}, [None, True, -1.5, "é", {"a": {"b": 1}}], []),
    Row({"type": "null"}, [None], [0, "", False]),
    Row({"type": "boolean"}, [True, False], [0, "true", None]),
    Row(INT, [0, -1, 12345678901234567890], [1.5, "1", 1e-3, True]),
    Row({"type": "number"}, [0, -1, 0.25, 1200], ["1", None, [1]]),
    Row(STR, ["", "a", "日本 🙂", 'a"b', "a\\b", "a\nb", "</s>", "x" * 50], [1, None, ["a"]]),
    Row({"type": ["string", "null"]}, ["a", None], [1, []]),
    Row({"type": ["integer", "string", "boolean"]}, [1, "a", True], [1.5, None]),
    Row({"enum": ["a", "b c", "ab"]}, ["a", "b c", "ab"], ["c", "abc", 1]),
    Row({"enum": ["a", 1, None, True]}, ["a", 1, None, True], ["1", False, 2]),
    Row({"enum": ["\n", '"', "\\", "é"]}, ["\n", '"', "\\", "é"], ["n", "", "e"]),
    Row({"type": "string", "enum": ["a", "b"]}, ["a"], ["c", 1]),
    Row({"enum": [{"a": 1}, [1]]}, [{"a": 1}, [1]], [{"a": 2}, [], [2]]),
    Row({"const": "x"}, ["x"], ["y", "xx"]),
    Row({"const": 3}, [3], [4, "3"]),
    Row({"type": "integer", "const": 3}, [3], [4]),
    # strings
    Row({"type": "string", "minLength": 2}, ["ab", "日本", "abc"], ["", "a", "日"]),
    Row({"type": "string", "maxLength": 2}, ["", "ab", "🙂🙂"], ["abc", "🙂🙂🙂"]),
    Row({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    Row({"type": "string", "pattern": "^a+$"}, ["a", "aaa"], ["", "ab", "ba"]),
    Row({"type": "string", "pattern": "a+"}, ["a", "bab"], ["", "b"]),
    Row({"type": "string", "pattern": "^a"}, ["a", "ab"], ["ba", ""]),
    Row({"type": "string", "pattern": "a$"}, ["a", "ba"], ["ab"]),
    Row({"type": "string", "pattern": "^(a|b)c?$|^x$"}, ["a", "bc", "x"], ["c", "ax", "xc"]),
    Row({"type": "string", "pattern": "^[^0-9]{2}$"}, ["ab", "é-"], ["a", "a1", "abc"]),
    Row({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"}, ["AB-123", "XY-0001"], ["AB-12", "ab-123"]),
    Row({"type": "string", "pattern": "^(?=a)[a-z]+$"}, ["ab"], ["ba"]),
    Row({"type": "string", "pattern": "^(?!a)[a-z]+$"}, ["ba"], ["ab"]),
    Row({"type": "string", "pattern": "^(a)\\1$"}, ["aa"], ["ab"]),
    Row({"type": "string", "pattern": "\\bcat\\b"}, ["a cat"], ["cats"]),
    Row({"type": "string", "pattern": "^.{2}$"}, ["ab"], ["a", "abc"]),
    Row({"type": "string", "pattern": "^a+$", "maxLength": 2}, ["aa"], ["aaa"]),
    Row({"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31"], ["2023-02-29", "2024-13-01", "2024-1-1"]),
    Row({"type": "string", "format": "time"}, ["12:30:00Z", "23:59:59.5+01:00"], ["24:00:00Z", "12:30"]),
    Row({"type": "string", "format": "date-time"}, ["2024-02-29T12:30:00Z"], ["2024-02-30T12:30:00Z", "2024-02-29"]),
    Row({"type": "string", "format": "uuid"}, ["12345678-1234-1234-1234-123456789abc"], ["12345678", "x"]),
    Row({"type": "string", "format": "ipv4"}, ["127.0.0.1", "255.255.255.0"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    Row({"type": "string", "format": "ipv6"}, ["::1"], ["1.2.3.4", "12345::"]),
    Row({"type": "string", "format": "email"}, ["a@b.cd"], ["ab"]),
    # numbers
    Row({"type": "integer", "minimum": 3}, [3, 100], [2, -3]),
    Row({"type": "integer", "maximum": -3}, [-3, -100], [-2, 3]),
    Row({"type": "integer", "minimum": -5, "maximum": 120}, [-5, 0, 99, 120], [-6, 121]),
    Row({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}, [4, 5], [3, 6]),
    Row({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.5, 1], [-0.1, 1.1]),
    Row({"type": "number", "exclusiveMinimum": 0}, [0.5, 7], [0, -1]),
    Row({"type": "number", "minimum": 2.5}, [2.5, 3], [2.4, -3]),
    Row({"type": "integer", "multipleOf": 7}, [0, 14, -7], [1, 15]),
    Row({"type": "number", "multipleOf": 0.5}, [0.5, 2], [0.3]),
    # lists
    Row({"type": "array", "items": INT}, [[], [1], [1, -2, 3]], [["a"], [1, None], {}]),
    Row({"type": "array", "items": INT, "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    Row({"type": "array", "items": INT, "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    Row({"type": "array", "items": INT, "minItems": 1, "maxItems": 3}, [[1], [1, 2, 3]], [[], [1, 2, 3, 4]]),
    Row({"type": "array", "items": {"type": "array", "items": STR}}, [[], [[]], [["a"], []]], [[1], ["a"]]),
    Row({"type": "array", "uniqueItems": True, "items": INT}, [[1, 2]], [[1, 1]]),
    Row({"type": "array", "prefixItems": [INT, STR]}, [[], [1], [1, "a"]], [["a"], [1, 2]], [[1, "a", None]]),
    Row({"type": "array", "prefixItems": [INT, STR], "items": False}, [[1, "a"]], [["a"], [1, "a", 1]]),
    Row({"type": "array", "prefixItems": [INT], "items": STR, "minItems": 2}, [[1, "a"]], [[1], [1, 2]]),
    Row({"type": "array", "contains": INT}, [[1], ["a", 1]], [[], ["a"]]),
    Row({"type": "array", "contains": INT, "minContains": 2}, [[1, 2]], [[1]]),
    Row({"type": "array", "unevaluatedItems": False}, [[]], [[1]]),
    # objects
    Row(obj({"a": INT}), [{}, {"a": 1}], [{"a": "b"}, {"b": 1}, []]),
    Row(obj({"a": INT, "b": STR}, ["a", "b"]), [{"a": 1, "b": "x"}], [{}, {"a": 1}, {"a": 1, "b": 2}]),
    Row(obj({"a": INT, "b": STR}, ["b"]), [{"b": "x"}, {"a": 1, "b": "x"}], [{"a": 1}]),
    Row(obj({"é b": INT, "c-d.e": STR}, ["é b"]), [{"é b": 1, "c-d.e": ""}], [{"c-d.e": ""}]),
    Row({"type": "object", "properties": {"a": INT}}, [{}, {"a": 1}], [{"a": "b"}], [{"b": "x"}, {"a": 1, "b": []}]),
    Row({"type": "object", "properties": {"a": INT}, "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}],
        [{"a": 1, "c": 2}]),
    Row({"type": "object", "additionalProperties": INT}, [{}, {"x": 1, "y": 2}], [{"x": "a"}]),
    Row(obj({"a": STR}, additionalProperties=INT), [{"a": "x", "b": 1}], [{"a": "x", "b": "y"}]),
    Row({"type": "object", "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
    Row({"type": "object", "minProperties": 1, "additionalProperties": INT}, [{"a": 1}], [{}]),
    Row(obj({"a": INT, "b": INT}, maxProperties=1), [{}, {"b": 1}], [{"a": 1, "b": 2}]),
    Row({"type": "object", "patternProperties": {"^x": INT}, "additionalProperties": False},
        [{"xa": 1}], [{"xa": "b"}]),
    Row({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"x": 1}], [{"a": 1}]),
    Row({"type": "object", "dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    Row({"type": "object", "dependencies": {"a": ["b"]}}, [{"b": 1}], [{"a": 1}]),
    Row(obj({"a": obj({"b": {"type": "array", "items": obj({"c": INT}, ["c"])}}, ["b"])}, ["a"]),
        [{"a": {"b": [{"c": 1}, {"c": 2}]}}, {"a": {"b": []}}], [{"a": {"b": [{}]}}, {"a": {}}]),
    # one of several, and references
    Row({"anyOf": [INT, {"type": "null"}]}, [1, None], ["a", 1.5]),
    Row({"anyOf": [obj({"a": INT}, ["a"]), obj({"b": STR}, ["b"])]}, [{"a": 1}, {"b": "x"}], [{"a": "x"}, {}]),
    Row({"anyOf": [STR, INT], "minimum": 3}, ["a", 3], [2]),
    Row({"oneOf": [INT, STR]}, [1, "a"], [None]),
    Row({"oneOf": [INT, {"type": "number"}]}, [1.5], [1]),
    Row({"oneOf": [obj({"k": {"const": "a"}}, ["k"]), obj({"k": {"const": "b"}}, ["k"])]}, [{"k": "a"}], [{"k": "c"}]),
    Row({"allOf": [INT, {"minimum": 3}]}, [3], [2, "a"]),
    Row({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": INT}}, [1], ["a"]),
    Row({"type": "integer", "not": {"const": 3}}, [4], [3]),
    Row({"if": INT, "then": {"minimum": 3}, "else": STR}, [3, "a"], [2, None]),
    Row({"$ref": "#/$defs/a", "$defs": {"a": INT}}, [1], ["a"]),
    Row({"$ref": "#/definitions/a", "definitions": {"a": STR}}, ["a"], [1]),
    Row({"$ref": "#/$defs/a", "$defs": {"a": INT}, "minimum": 3}, [3], [2]),
    Row({"$ref": "#/$defs/a~1b", "$defs": {"a/b": INT}}, [1], ["a"]),
    Row({"$ref": "#/$defs/n", "$defs": {"n": obj({"v": INT, "n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
        ["v", "n"])}}, [{"v": 1, "n": {"v": 2, "n": None}}], [{"v": 1}, {"v": 1, "n": {"v": 2}}]),
    Row(obj({"a": {"$ref": "#/properties/b"}, "b": INT}, ["a"]), [{"a": 1}], [{"a": "x"}]),
    Row({"$anchor": "x", "type": "object", "properties": {"a": {"$ref": "#x"}}}, [{"a": {}}], [{"a": 1}]),
    # without a type, and annotations
    Row({"minimum": 3}, [3, "a"], [2]),
    Row({"minLength": 2}, ["ab", 1], ["a"]),
    Row({"properties": {"a": INT}}, [{"a": 1}, 3], [{"a": "b"}]),
    Row({"required": ["a"]}, [{"a": 1}, 3], [{}]),
    Row({"title": "T", "description": "d", "default": 1, "examples": [1], "$comment": "c", "deprecated": True, **INT},
        [1], ["a"]),
    Row({"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/a", **INT}, [1], ["a"]),
    Row({"$schema": "http://json-schema.org/draft-07/schema#", "readOnly": True, "x-kind": {"not": {}}, **INT},
        [1], ["a"]),
)  # fmt: skip
