"""Faults of the libraries that the backends mend or refuse: each of these was allowed."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import numpy as np
import pytest

from ferrule.forms import Fixed, Form, GrammarSpec, Json, Regex, Rules, Series
from ferrule.plugin import discover
from ferrule_plugins.guided_decoding.patterns import UnsupportedPattern, anywhere, json_text, whitespace, whole
from ferrule_testkit.kits.guided_texts import MERGED, accepts, first_refused, vocabulary, whole_tokens_of

VOCABULARY = vocabulary()
GUIDANCE = discover().make("guided_decoding", "guidance", VOCABULARY)
NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**NAMED, "additionalProperties": False}


def allows(name: str, form: Form, text: str) -> bool | None:
    """Return whether a backend allows a text; None if it refuses the form."""
    backend = discover().make("guided_decoding", name, VOCABULARY)
    spec = GrammarSpec(form=form)
    if backend.refuses(spec) is not None:
        return None
    return accepts(backend.load(backend.compile(spec)), VOCABULARY, text)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (NAMED, '{"a":1,"b\\u0061":"x"}', '{"a":1,"\\u0061":"x"}'),
        ({"type": "string", "maxLength": 2}, '"\\n\\u00e9"', '"a\tb"'),
        ({"type": "string", "maxLength": 2}, '"\\ud83d\\ude00a"', '"\\ud83d"'),
        ({"type": "string", "minLength": 1, "maxLength": 1}, '"\\u00e9"', '"\t"'),
        ({"type": "string", "pattern": "^1(?:[.][0-9]+)?$"}, '"1.25"', '"125"'),
        ({"type": "string", "pattern": "^root[^x]$"}, '"rootb"', '"rootx"'),
    ],
)
def test_xgrammar(schema: dict[str, object], right: str, wrong: str) -> None:
    assert (allows("xgrammar", Json(schema), right), allows("xgrammar", Json(schema), wrong)) == (True, False)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (CLOSED, '{"a":12}', '{"a":1e-3}'),
        (CLOSED, '{"a": 1}', '{"a":1,}'),
        (CLOSED, '{"a":-1}', '{"a":-0.5}'),
        ({"type": "number"}, "1.5", "1.e5"),
        ({"type": "string"}, '"a b"', '"a\tb"'),
    ],
)
def test_lm_format_enforcer(schema: dict[str, object], right: str, wrong: str) -> None:
    name = "lm-format-enforcer"
    assert (allows(name, Json(schema), right), allows(name, Json(schema), wrong)) == (True, False)


@pytest.mark.parametrize("pattern", ["a|ab", "(a|ab)(c|)", "a??b{1,2}"])
def test_outlines_takes_the_longest_of_several(pattern: str) -> None:
    assert allows("outlines", Series((Regex(pattern), Fixed(""))), "ab") is True


@pytest.mark.parametrize("form", [Regex("a*"), Fixed(""), Series(()), Series((Fixed(""), Regex("a?|b")))])
def test_outlines_refuses_texts_that_may_be_empty(form: Form) -> None:
    assert allows("outlines", form, "") is None


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
@pytest.mark.parametrize("source", ['start: <[5]> "a"', 'root ::= "a" Token(3)', 'start: %json {"uniqueItems": true}'])
def test_grammars_do_not_name_tokens_or_schemas(name: str, source: str) -> None:
    assert allows(name, Rules(source), "a") is None


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
def test_such_words_in_a_text_are_allowed(name: str) -> None:
    assert allows(name, Rules('start: "<|Token(" /<[%]json/'), "<|Token(<%json") is True


@pytest.mark.parametrize(("pattern", "text"), [("^a|b$", "a|b"), ("^(a|b)$", "(a|b)"), (r"a\|b[|^$]", r"a\|b[|^$]")])
def test_a_whole_pattern_has_no_anchors(pattern: str, text: str) -> None:
    assert whole(pattern) == text


def test_a_pattern_is_found_anywhere() -> None:
    assert anywhere("^a|b$|c") == r"a[\s\S]*|[\s\S]*b|[\s\S]*c[\s\S]*"
    assert json_text("^.$") == r'[^"\\\x00-\x1f]'


@pytest.mark.advisory("CVE-2025-48943")
@pytest.mark.parametrize("pattern", ["(?=a)b", r"\bb", r"(a)\1", "a^b", "(?i)a", "(^a)", r"\p{L}", "a)", "a\\"])
def test_what_is_not_a_regular_expression_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern):
        whole(pattern)


@pytest.mark.parametrize("pattern", ["^[ -~]$", '^"$', r"^\\$", "^\n$", r"^\t$"])
def test_what_json_escapes_is_refused_in_patterns_of_strings(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern):
        json_text(pattern)


def test_white_space_is_white_space() -> None:
    assert whitespace(r"[\s]{0,2}|\s?") == r"[ \t\n\r]{0,2}|[ \t\n\r]?"
    for pattern in ("a*", "[^a]", ".", "[0-9]", r"\S"):
        with pytest.raises(ValueError, match="white space"):
            whitespace(pattern)


@pytest.mark.advisory("libraries-of-guided-decoding")
def test_guidance_bounds_the_states_of_one_output() -> None:
    """Follow a pattern of which each text of 20 letters is another state."""
    backend = discover().make("guided_decoding", "guidance", VOCABULARY)
    grammar = backend.load(backend.compile(GrammarSpec(form=Regex("[ab]*a[ab]{20}"))))
    source, mask = random.Random(0), np.zeros((1, VOCABULARY.words), np.int32)
    letters = [VOCABULARY.tokens.index(letter) for letter in (b"a", b"b")]

    def write(count: int) -> None:
        for _ in range(count):
            backend.fill([grammar], mask)
            assert grammar.accept([source.choice(letters)])

    with pytest.raises(ValueError, match="too many states"):
        write(20_000)


@pytest.mark.parametrize("pattern", ["^a$", "^(a)$", "^(?:a|b)$", "^a|b$", "^[ab]$", "^a"])
@pytest.mark.parametrize("more", [{}, {"type": "object"}, {"required": ["a"]}])
def test_guidance_takes_names_that_a_pattern_matches_too(pattern: str, more: dict[str, object]) -> None:
    """Apply both schemas to the value of such a property, and allow no name twice."""
    source = {
        "properties": {"a": {"type": "integer"}, "c": {"type": "integer"}},
        "patternProperties": {pattern: {"minimum": 3}},
        "additionalProperties": False,
        **more,
    }
    judge, data = jsonschema.Draft202012Validator(source), GUIDANCE.compile(GrammarSpec(form=Json(source)))
    for text in ('{"a":3}', '{"a":2}', '{"a":3,"c":1}', '{"b":3}', '{"a":3,"b":3}', '{"a":3,"b":"x"}', '{"d":1}', "{}"):
        assert accepts(GUIDANCE.load(data), VOCABULARY, text) is judge.is_valid(json.loads(text)), text
    assert not accepts(GUIDANCE.load(data), VOCABULARY, '{"a":3,"a":3}')


BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
CLASSES = ["[^x&&y]", "[x&&y]", "[a~~b]", "[[a]", "[a[]", "[+--]", "[--a]", "[a-]", "[-a]", "[a-c&&b]", r"[\[~-]"]


@pytest.mark.filterwarnings("ignore:Possible (nested|set)")
@pytest.mark.parametrize("pattern", [*CLASSES, "[[:alpha:]]"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_class_of_characters_holds_no_other_class(name: str, pattern: str) -> None:
    backend = discover().make("guided_decoding", name, VOCABULARY)
    for form, around in ((Regex(pattern), ""), (Json({"type": "string", "pattern": f"^{pattern}$"}), '"')):
        if backend.refuses(GrammarSpec(form=form)) is None:
            data = backend.compile(GrammarSpec(form=form))
            for text in (*"xyab&~[-:+,z", "a]", "[]"):
                right = re.fullmatch(pattern, text) is not None
                assert accepts(backend.load(data), VOCABULARY, f"{around}{text}{around}") is right, text


@pytest.mark.parametrize("name", ["é", "a b", "ü/x", '"', "日本"])
def test_guidance_follows_references_to_any_name(name: str) -> None:
    escaped = name.replace("/", "~1")
    schema = {"$ref": f"#/$defs/{escaped}", "$defs": {name: {"type": "integer"}}}
    assert (allows("guidance", Json(schema), "1"), allows("guidance", Json(schema), '"x"')) == (True, False)


@pytest.mark.parametrize(
    "value", [0, 2**53, -(2**53), 2**53 + 1, 2**62, 2**63 - 1, 1 - 2**63, -(2**63), 2**63, 2**64 - 1]
)
@pytest.mark.parametrize("name", BACKENDS)
def test_integers_are_exact_or_refused(name: str, value: int) -> None:
    backend = discover().make("guided_decoding", name, VOCABULARY)
    for schema in ({"const": value}, {"enum": [value]}, {"type": "integer", "maximum": value}, {"maximum": value}):
        spec = GrammarSpec(form=Json(schema))
        if backend.refuses(spec) is None:
            data, judge = backend.compile(spec), jsonschema.Draft202012Validator(schema)
            for number in (value - 1, value, value + 1):
                assert accepts(backend.load(data), VOCABULARY, str(number)) is judge.is_valid(number), (schema, number)


STRINGS = ({"type": "string"}, {"type": "string", "minLength": 1, "maxLength": 1}, {"type": "string", "maxLength": 3})
IN_OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
CHARACTERS = ("é", "日", "\U0001f600", "/", "\n", "\x1b", "\x7f", '"', "\\", "A")


def spellings(char: str) -> set[str]:
    """Return a character as JSON may write it in a string."""
    units = char.encode("utf-16-be").hex()
    numbers = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    short = {"/": "\\/", "\n": "\\n"}.get(char, json.dumps(char, ensure_ascii=False)[1:-1])
    return {numbers, numbers.upper().replace("\\U", "\\u"), short, json.dumps(char)[1:-1]}


WORDS = vocabulary((*MERGED, "\U0001f600"))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("schema", STRINGS, ids=range(3))
def test_what_begins_as_an_escape_is_the_character_that_it_names(name: str, schema: dict[str, object]) -> None:
    """Allow every spelling, or do not allow its beginning: none turns into another character."""
    backend = discover().make("guided_decoding", name, WORDS)
    if backend.refuses(spec := GrammarSpec(form=Json(schema))) is not None:
        return
    data = backend.compile(spec)
    for text in (f'"{spelling}"' for char in CHARACTERS for spelling in spellings(char)):
        begun = name != "guidance" or not text.startswith(('"\\u', '"\\/')) and "\x7f" not in text
        grammar = backend.load(data)
        assert (first_refused(grammar, WORDS, whole_tokens_of(text, WORDS)) is None) is begun, text
        if not begun and "\\" in text:
            assert first_refused(backend.load(data), WORDS, whole_tokens_of(text[:3], WORDS)) == 2, text


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("value", ["é", "\U0001f600", "/", "\x1b"])
def test_a_string_that_a_schema_names_can_be_written(name: str, value: str) -> None:
    backend = discover().make("guided_decoding", name, WORDS)
    for schema in ({"const": value}, {"enum": [value, "b"]}):
        if backend.refuses(spec := GrammarSpec(form=Json(schema))) is None:
            data = backend.compile(spec)
            tokens = [whole_tokens_of(f'"{text}"', WORDS) for text in spellings(value)]
            assert any(first_refused(backend.load(data), WORDS, ids) is None for ids in tokens)


def test_guidance_does_not_spell_a_name_that_the_schema_has() -> None:
    assert (allows("guidance", Json(NAMED), '{"b":"x"}'), allows("guidance", Json(NAMED), '{"\\u0061":"x"}')) == (
        True,
        False,
    )
