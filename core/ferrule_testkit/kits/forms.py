"""Forms of text for the kit of guided decoding, each with texts that match it and texts that do not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ferrule.forms import Anything, Fixed, Form, Json, OneOf, Regex, Repeated, Rules, Series, Tag, Triggered, Until


@dataclass(frozen=True)
class FormTexts:
    """A form, what `right` says of any text, and texts for which it is true and false."""

    form: Form
    right: Callable[[str], bool]
    good: Sequence[str]
    bad: Sequence[str]


def _pattern(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None


def _value(right: Callable[[Any], bool]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            return right(json.loads(text))
        except ValueError:
            return False

    return check


def _is_person(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"name", "age", "kind"}
        and isinstance(value["name"], str)
        and type(value["age"]) is int
        and value["kind"] in ("a", "b")
    )


_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
_TAGS = Triggered(("<t",), (Tag("<t>", Regex("a{1,3}"), "</t>"), Tag("<tx", Fixed("bb"))))
_TWO_TRIGGERS = Triggered(("<t", "[x"), (Tag("<t>", Regex("a{1,3}"), "</t>"), Tag("[x]", Fixed("bb"))))

FORMS = (
    FormTexts(
        OneOf((Fixed("yes"), Fixed("yes!"), Fixed("no"), Fixed("名前"))),
        lambda text: text in ("yes", "yes!", "no", "名前"),
        ("yes", "yes!", "no", "名前"),
        ("", "y", "yes!!", "nono", "名", "maybe"),
    ),
    FormTexts(Fixed('"a" 日本🙂'), lambda text: text == '"a" 日本🙂', ('"a" 日本🙂',), ('"a"', '"a" 日本🙂 ')),
    FormTexts(
        Regex("[a-c]{2,4}-[0-9]+(?:\\.5)?"),
        _pattern("[a-c]{2,4}-[0-9]+(?:\\.5)?"),
        ("ab-1", "cccc-0012.5"),
        ("a-1", "ab-", "ab-1.", "abcab-1", " ab-1"),
    ),
    FormTexts(
        Json(_PERSON),
        _value(_is_person),
        ('{"name":"","age":-10,"kind":"b"}', '{"name": "é日 the", "age": 0, "kind": "a"}'),
        ('{"name":"","age":1.5,"kind":"b"}', '{"name":"","age":1}', '{"name":"","age":1,"kind":"c"}', "{}", "1"),
    ),
    FormTexts(
        Json({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}),
        _value(lambda value: isinstance(value, list) and 1 <= len(value) <= 3 and {*map(type, value)} == {bool}),
        ("[true]", "[true, false, true]"),
        ("[]", "[true,true,true,true]", "[null]", "[true"),
    ),
    FormTexts(
        Series((Fixed("<tool>"), Json({"type": "integer"}), Fixed("</"))),
        _pattern(r"<tool>\s*-?[0-9]+\s*</"),
        ("<tool>10</",),
        ("<tool>10", "<tool></", "10"),
    ),
    FormTexts(
        Repeated(OneOf((Fixed("ab"), Fixed("a"))), ",", 1, 3),
        _pattern("(ab?)(,ab?){0,2}"),
        ("ab", "a,ab", "ab,ab,a"),
        ("", "ab,", "abab", "a,a,a,a"),
    ),
    FormTexts(Until("</s>"), _pattern("((?!</s>).)*</s>"), ("</s>", "a</</s>"), ("a", "</s>a", "</s></s>")),
    FormTexts(
        Until("</s>", ("</x>",)),
        _pattern("((?!</[sx]>).)*</[sx]>"),
        ("</x>", "a</</s>"),
        ("a", "</s>a", "</s></s>", "</x></s>"),
    ),
    FormTexts(
        OneOf(
            (
                Series((Until("</s>", without=("<c>",)), Fixed("a"))),
                Series((Until("<c>", without=("</s>",)), Fixed("b"))),
            )
        ),
        _pattern("((?!</s>|<c>).)*(</s>a|<c>b)"),
        ("</s>a", "x <c>b", "<</s>a"),
        ("</s>b", "<c>a", "<c></s>a", "</s><c>b", "<c>"),
    ),
    FormTexts(
        Until("</s>", least=1, most=3),
        _pattern("((?!</s>).){1,3}</s>"),
        ("a</s>", "日a</s>", "a\n</s>", "/日é</s>"),
        ("</s>", "abcd</s>", "a</s></s>", "</s></s>"),
    ),
    FormTexts(
        Until("|<x>", ("<y>",), ("<x>",), most=2),
        _pattern(r"((?!<[xy]>).){0,2}(\|<x>|<y>)"),
        ("|<x>", "<y>", "a日|<x>", "a<y>"),
        ("<x>", "a<x>", "abc<y>", "<x|<y>"),
    ),
    FormTexts(Anything(), lambda text: True, ("", "a {日"), ()),
    FormTexts(
        _TAGS,
        _pattern("((?!<t).|<t>a{1,3}</t>|<txbb)*"),
        ("", "x < y", "x<t>aa</t><txbb!", "<<t>a</t>"),
        ("<t", "<t>b", "<t>a</t", "<txb", "a<tool>"),
    ),
    FormTexts(
        _TWO_TRIGGERS,
        _pattern(r"((?!<t|\[x).|<t>a{1,3}</t>|\[x\]bb)*"),
        ("", "x < [y]", "x<t>aa</t>[x]bb!", "[<t>a</t>", "[[x]bb"),
        ("<t", "[x", "[x]aa</t>", "<t>bb", "a<tool>", "<t>a</t>[x]ba"),
    ),
    FormTexts(
        Rules('start: "a" start "b" | "x"'),
        lambda text: text == "a" * text.count("a") + "x" + "b" * text.count("a"),
        ("x", "aaxbb"),
        ("", "ab", "axbb", "aaxb"),
    ),
    FormTexts(
        Rules('root ::= "a" root "b" | [x-z]'),
        lambda text: re.fullmatch("a*[xyz]b*", text) is not None and text.count("a") == text.count("b"),
        ("y", "aazbb"),
        ("", "ab", "axbb", "aaxb"),
    ),
)

# One schema for each keyword: a value that is valid, and one that only this keyword forbids.
KEYWORDS: tuple[tuple[dict[str, Any], Any, Any], ...] = (
    ({"type": "string"}, "a", 1),
    ({"enum": ["a", 2]}, 2, "b"),
    ({"const": "a"}, "a", "b"),
    ({"type": "string", "minLength": 2}, "ab", "a"),
    ({"type": "string", "maxLength": 2}, "ab", "abc"),
    ({"type": "string", "pattern": "^a+$"}, "aa", "ab"),
    ({"type": "string", "format": "date"}, "2024-02-29", "2024-02-30"),
    ({"type": "integer", "minimum": 3}, 3, 2),
    ({"type": "integer", "maximum": 3}, 3, 4),
    ({"type": "integer", "exclusiveMinimum": 3}, 4, 3),
    ({"type": "integer", "exclusiveMaximum": 3}, 2, 3),
    ({"type": "integer", "multipleOf": 3}, 12, 10),
    ({"type": "array", "items": {"type": "integer"}}, [1], ["a"]),
    ({"type": "array", "prefixItems": [{"type": "integer"}]}, [1, "a"], ["a"]),
    ({"type": "array", "minItems": 1}, [1], []),
    ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    ({"type": "array", "uniqueItems": True}, [1, 2], [1, 1]),
    ({"type": "array", "contains": {"type": "integer"}}, ["a", 1], ["a"]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, {"a": 1}, {"a": "b"}),
    ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"a": 1}, {}),
    ({"type": "object", "required": ["a"]}, {"a": 1}, {"b": 1}),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, {"a": 1}, {"b": 1}),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1}, {"a": "b"}),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, {"ab": 1}, {"ab": "b"}),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, {"a": 1}, {"ab": 1}),
    ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1, "b": 1}, {"a": 1}),
    ({"type": "object", "unevaluatedProperties": False}, {}, {"a": 1}),
    ({"type": "array", "unevaluatedItems": False}, [], [1]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "a", 1),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, 3, 2),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1.5, 1),
    ({"not": {"type": "integer"}}, "a", 1),
    ({"type": "integer", "if": {"minimum": 1}, "then": {"minimum": 3}}, 3, 2),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, 1, "a"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "minimum": 3}, 3, 2),
)

WRONG: tuple[Form, ...] = (
    Regex("(a"),
    Json({"type": "strin"}),
    Json({"$ref": "#/$defs/a"}),
    Json(False),
    OneOf(()),
    Rules("start: unknown_rule"),
    Rules('root ::= "a'),
    Triggered(("<t",), (Tag("<x", Fixed("a")),)),
    Triggered(("<t", "<x"), (Tag("<x", Fixed("a")),)),
    Triggered(("<t", "<to"), (Tag("<t>", Fixed("a")), Tag("<to>", Fixed("a")))),
)
