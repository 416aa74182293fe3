"""Described formats: what the constraint lets through is what the parser reads, for every built-in tool parser."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import jsonschema
import numpy as np
import pytest
from msgspec.structs import replace

from ferrule.forms import GrammarSpec
from ferrule.frontend.output.parse import ParseChain, Parsers
from ferrule.interfaces.guided_decoding import GrammarBackend, Vocabulary
from ferrule.interfaces.parsers import ChoiceContext, TextDelta, ToolParser
from ferrule.plugin import discover
from ferrule_parsing import FormatParser, Tags
from ferrule_parsing.argument_schemas import described
from ferrule_plugins.guided_decoding.guidance import Guidance
from ferrule_plugins.guided_decoding.xgrammar import XGrammar
from ferrule_testkit.kits.guided_texts import allowed
from ferrule_testkit.kits.parsers import Fold, fold
from ferrule_testkit.kits.tool_parser import CallText, ToolParserKit
from tests.shared import grid

PLUGINS = discover()
PARSERS = {
    name: PLUGINS.load("tool_parser", name)
    for name in PLUGINS.names("tool_parser")
    if issubclass(PLUGINS.load("tool_parser", name), FormatParser)
}
ENDS = (
    *("</parameter>", "</arg_value>", "</｜DSML｜parameter>", "</steptml:parameter>", "<escape>", '<|"|>'),
    *("<|close|>argument<|sep|>", "<|tool_arg:end|>", "</param>"),
    *('"', "}", "]", "\n"),
)
MARKS = sorted({text for parser in PARSERS.values() for text in (*parser.special_tokens, *ENDS)})
TEXTS = ["a", "b", " ", "é", "<", "</", "{", "[", ",", ":", "\\", "12", "true", "null", '", "', "&", "|", "｜"]
TOKENS = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in (*MARKS, *TEXTS) if len(text) > 1), b""]
WORDS = Vocabulary(tuple(TOKENS), len(TOKENS), (len(TOKENS) - 1,))
STOP = WORDS.stop_ids[0]
PRINTABLE = np.array([len(token) > 1 or b" " <= token <= b"~" for token in TOKENS])


def function(name: str, strict: bool = False, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}}


PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}, "required": ["city"]}
TOOLS = (
    function(
        "get_weather",
        strict=True,
        type="object",
        properties={
            "city": {"type": "string"},
            "unit": {"enum": ["C", "F", "</parameter>"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "hourly": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        },
        required=["city", "days"],
        additionalProperties=False,
    ),
    function("now"),
    function(
        "travel",
        strict=True,
        type="object",
        properties={
            "from": {"$ref": "#/$defs/place"},
            "stops": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
        },
        required=["from"],
        **{"$defs": {"place": PLACE}},
    ),
)
NAMED = {"type": "function", "function": {"name": "travel"}}


@pytest.fixture(scope="module")
def backend() -> Guidance:
    return Guidance(WORDS)


def made(name: str, tools: Any, choice: Any, **more: Any) -> tuple[ToolParser, GrammarSpec | None]:
    chain = ParseChain(Parsers(tools=PARSERS[name]), tools, ChoiceContext(tools=tools, tool_choice=choice, **more))
    assert chain.tools is not None
    return chain.tools, chain.constraint


def generated(backend: GrammarBackend, name: str, spec: GrammarSpec, seed: int, length: int = 80) -> str:
    """Return a random text that the constraint allows. After `length` tokens, ends of values are preferred."""
    rng = random.Random(seed)
    grammar, text = backend.load(backend.compile(replace(spec, any_whitespace=False))), b""
    written = repr(PARSERS[name]([]).format)  # type: ignore[attr-defined]
    ends = [TOKENS.index(end.encode()) for end in ENDS if end in written or end in '"}]\n']
    for place in range(20 * length):
        bits = allowed(grammar, WORDS)
        found = np.flatnonzero(bits)
        if bits[STOP] and (len(found) == 1 or rng.random() < 0.2 or place > length):
            return text.decode()
        printable = found[PRINTABLE[found]].tolist()
        ending = [id for id in ends if bits[id]]
        hurries = ending and place > length and rng.random() < 0.8
        chosen = rng.choice(ending if hurries else printable or found.tolist())
        assert grammar.accept([chosen])
        text += TOKENS[chosen]
    raise AssertionError(f"no end: {text[-300:]!r}")


def checked(parser: ToolParser, tools: Any, text: str, size: int) -> Fold:
    """Return the calls of a text: their functions are offered, their arguments valid."""
    found = fold(parser, [text[at : at + size] for at in range(0, len(text), size)])
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools}
    for call in found.calls:
        schema = schemas[call.name]["parameters"] or {"type": "object", "maxProperties": 0}
        jsonschema.validate(json.loads(call.arguments), schema)
    return found


PYTHON = {"pythonic", "llama4_pythonic", "olmo3", "lfm2"}


@pytest.mark.parametrize("name", sorted(set(PARSERS) - PYTHON))
def test_the_samples_of_the_format_fit_its_constraint(backend: Guidance, name: str) -> None:
    """Allow the spelling that models write."""
    module, _, constant = PARSERS[name].conformance.partition(":")
    samples = getattr(import_module(module), constant)["samples"]
    calls = next(sample for sample in samples if all(isinstance(part, CallText) for part in sample))
    tools = tuple(function(call.name, type="object", properties=_properties(call)) for call in calls)
    _, spec = made(name, tools, "required")
    assert spec is not None
    grammar = backend.load(backend.compile(spec))
    text = "".join(call.text for call in calls)
    data = text.encode()
    followed = next((at for at in range(len(data)) if not grammar.accept([data[at]])), None)
    assert followed is None, f"{name} {text!r} breaks off at {data[followed:][:80]!r}"
    assert allowed(grammar, WORDS)[STOP]


@pytest.mark.parametrize("name", sorted(PYTHON))
def test_values_are_generated_as_python_writes_them(backend: Guidance, name: str) -> None:
    format = PARSERS[name].format
    open, close = format.brackets or ("\n", "\n")
    call = 'get_weather(city="a\\"b", days=3, unit="C", hourly=True, note=None)'
    tags = (format.open[0], format.close[0]) if format.open[0] else ("", "")
    _, spec = made(name, TOOLS, "required")
    assert spec is not None
    grammar = backend.load(backend.compile(spec))
    assert grammar.accept(list(f"{tags[0]}{open}{call}{close}{tags[1]}".encode()))
    assert allowed(grammar, WORDS)[STOP]


def _properties(call: CallText) -> dict[str, Any]:
    kinds = {str: "string", int: "number", float: "number"}
    return {key: {"type": kinds.get(type(value), "object")} for key, value in call.arguments.items()}


@grid({"name": tuple(PARSERS), "choice": ("required", NAMED, "one")})
def test_enforced_calls_are_read_and_valid(backend: Guidance, name: str, choice: Any) -> None:
    asked, parallel = ("required", False) if choice == "one" else (choice, True)
    for seed in range(4):
        parser, spec = made(name, TOOLS, asked, parallel_tool_calls=parallel)
        assert isinstance(parser, PARSERS[name]), "the format cannot say this, so JSON would take its place"
        assert spec is not None
        text = generated(backend, name, spec, seed)
        found = checked(parser, TOOLS, text, size=1 + seed * 3)
        assert found.calls, text
        assert not found.content.strip(), text
        if choice != "required":
            assert len(found.calls) == 1, text
        if choice == NAMED:
            assert found.calls[0].name == "travel"


@pytest.mark.parametrize("name", PARSERS)
def test_strict_functions_are_valid_where_the_model_chooses(backend: Guidance, name: str) -> None:
    parser, spec = made(name, TOOLS, "auto")
    assert spec is not None
    text = generated(backend, name, spec, seed=1, length=10)
    checked(parser, TOOLS, text, size=5)


@pytest.mark.parametrize(
    ("name", "begun", "goes"),
    [
        ("llama3_json", "Yes. {", True),
        ("llama3_json", '<b>{"name": "f"', True),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "', True),
        ("llama3_json", '{"name": "f"', False),
        ("llama3_json", '<|python_tag|>{"name": "f"', False),
        ("llama3_json", 'So: <|python_start|>{"name": "f"', False),
        ("xlam", "``x", True),
        ("xlam", "[TOOL", True),
        ("xlam", "[x", False),
        ("xlam", '```json[{"name": "f"', False),
        ("xlam", 'a <tool_call>[{"name": "travel", "arguments": {"from', True),
        ("granite", 'a <tool_call>[{"name": "travel", "arguments": {"from', True),
        ("granite", 'a <tool_call>[{"name": "f"', False),
        ("granite", 'a <|tool_call|>[{"name": "f"', False),
        ("phi4_mini_json", "import functools\nfunctools.reduce(add, [1])", True),
        ("phi4_mini_json", 'So: functools[{"name": "travel", "arguments": {"from', True),
        ("phi4_mini_json", 'So: functools[{"name": "f"', False),
        ("phi4_mini_json", 'So: <|tool_call|>[{"name": "f"', False),
    ],
)
def test_strict_calls_may_begin_with_any_of_unlike_tags(backend: Guidance, name: str, begun: str, goes: bool) -> None:
    _, spec = made(name, TOOLS, "auto")
    assert spec is not None
    grammar = backend.load(backend.compile(spec))
    assert all(grammar.accept([byte]) for byte in begun.encode()) is goes


def test_strict_calls_of_harmony_begin_at_the_recipient(backend: Guidance) -> None:
    chain = ParseChain(Parsers(tools=PLUGINS.load("tool_parser", "openai")), TOOLS, ChoiceContext(tools=TOOLS))
    parser, spec = chain.tools, chain.constraint
    assert parser is not None
    assert spec is not None
    arguments = '{"city": "Rome", "days": 2}'
    for header in (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>",
    ):
        grammar = backend.load(backend.compile(spec))
        assert grammar.accept(list(f"<|channel|>final<|message|>Now.<|end|>{header}{arguments}".encode()))
        assert not backend.load(backend.compile(spec)).accept(list(f'{header}{{"city": 3'.encode()))
        assert allowed(grammar, WORDS)[STOP]
    assert checked(parser, TOOLS, header + arguments, size=3).calls


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("kimi_k2", "<|tool_call_begin|>"),
        ("deepseek_v3", "<｜tool▁calls｜>"),
        ("internlm", "<|action_start|> <|plugin|>"),
    ],
)
def test_strict_calls_begin_with_the_first_of_tags_that_begin_alike(backend: Guidance, name: str, other: str) -> None:
    _, spec = made(name, TOOLS, "auto")
    assert spec is not None
    for tag, goes in ((PARSERS[name].format.open[0], True), (other, False)):
        grammar = backend.load(backend.compile(spec))
        assert all(grammar.accept([byte]) for byte in f"It is {tag}".encode()) is goes


def patterns() -> Iterator[dict[str, Any]]:
    """Yield schemas that a parser's own format cannot express completely."""
    yield {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a<+$"}}, "required": ["a"]}
    yield {"type": "object", "patternProperties": {"^x": {"type": "integer"}}}
    yield {"type": "object", "properties": {"a": {}}, "minProperties": 1}
    yield {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "string"}}}
    yield {"anyOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]}


@pytest.mark.parametrize("schema", list(patterns()), ids=range(5))
@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4"])
def test_what_a_format_cannot_say_is_enforced_as_json(name: str, schema: dict[str, Any]) -> None:
    parser, spec = made(name, (function("f", **schema),), "required")
    assert spec is not None
    assert not isinstance(parser, PARSERS[name])


def test_kits_know_every_setting() -> None:
    for parser in PARSERS.values():
        module, _, constant = parser.conformance.partition(":")
        settings = getattr(import_module(module), constant)
        assert set(settings) <= set(ToolParserKit.settings())


@pytest.mark.advisory("CVE-2025-48887")
@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("size", [1 << 15, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_a_long_text_of_anything_is_read_in_linear_time(name: str, size: int) -> None:
    """Read it whole and in deltas. Quadratic work on the longer one would not end within the test's limit."""
    tags = PARSERS[name].special_tokens or ("{",)
    for unit in ("word ", "<", "[", "\n", tags[0], "f(a='", '{"name": "'):
        text = unit * (size // len(unit))
        parser = PARSERS[name](TOOLS)
        parser.begin(ChoiceContext(tools=TOOLS, tool_choice="auto"))
        parser.feed(TextDelta(text))
        for at in range(2000):
            parser.feed(TextDelta(text[at : at + 5]))
        parser.finish()


@pytest.mark.parametrize("step", [100, 1 << 20])
def test_a_choice_has_so_many_calls_and_the_rest_is_text(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrule_parsing.format_parser._MOST_CALLS", 50)
    text = "[" + "get_weather(), " * 80 + "get_weather()]"
    found = fold(PARSERS["pythonic"](TOOLS), [text[at : at + step] for at in range(0, len(text), step)])
    assert [call.name for call in found.calls] == ["get_weather"] * 50
    assert found.content == ", " + "get_weather(), " * 30 + "get_weather()]"
    again = "<tool_call>" + '{"name": "get_weather"}' + "</tool_call>"
    found = fold(PARSERS["hermes"](TOOLS), [again * 60])
    assert (len(found.calls), found.content) == (50, again * 10)


def test_the_word_in_front_of_calls_is_text_where_no_list_follows() -> None:
    text = 'import functools\nfunctools.reduce(f, [{"name": "now"}]) functools [{"name": "now", "arguments": {}}]'
    found = fold(PARSERS["phi4_mini_json"](TOOLS), list(text))
    assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize("name", PARSERS)
def test_the_second_call_is_read_with_what_the_first_one_prepared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare what depends on the format alone once, not for each of the thousands of calls that an output may have."""
    module, _, constant = PARSERS[name].conformance.partition(":")
    samples = getattr(import_module(module), constant)["samples"]
    text = next("".join(part.text for part in sample) for sample in samples if isinstance(sample[0], CallText))
    made: list[tuple[str, ...]] = []
    prepare = Tags.__init__

    def counted(self: Tags, *tags: str) -> None:
        made.append(tags)
        prepare(self, *tags)

    monkeypatch.setattr(Tags, "__init__", counted)
    parser = PARSERS[name](TOOLS)
    parser.begin(ChoiceContext(tools=TOOLS, tool_choice="auto"))
    parser.feed(TextDelta(text))
    made.clear()
    events = [event for _ in range(3) for event in parser.feed(TextDelta(text))]
    assert events
    assert made == []


M3 = ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<a>]<]minimax[>[<b>1]<]minimax[>[</b>'


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": ["x"]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": "{"}}},
        {"type": "object", "properties": {"a": {"enum": "abc"}}},
        {"type": "object", "properties": {"a": {"type": [{}]}}, "required": [{}]},
        {"type": "object", "properties": {"a": {"anyOf": {"b": 1}}}},
        {"type": "object", "properties": ["a"]},
        {"type": "object", "properties": {"a": 5}, "required": "a"},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}, "maxItems": -1}}},
    ],
    ids=range(9),
)
@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4", "pythonic", "hermes", "minimax_m3"])
def test_schemas_that_are_none_raise_nothing(name: str, schema: dict[str, Any]) -> None:
    """Raise nothing: the backend that compiles the constraint says what is wrong."""
    tools = (function("f", strict=True, **schema),)
    for choice in ("required", "auto"):
        parser, _ = made(name, tools, choice)
        for part in (*json.dumps({"name": "f", "arguments": {"a": 1}}), "<function=f><parameter=a>1</parameter>", M3):
            parser.feed(TextDelta(part))
        parser.finish()


N = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
CHAIN = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
ROOTS = [
    N,
    {"$ref": "#/$defs/é", "$defs": {"é": N}},
    {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}], "$defs": {"a": N}},
    {"anyOf": [{"properties": {"n": {"type": "integer"}}}, {"properties": {"s": {"type": "string"}}}]},
    {"oneOf": [N, {"type": "object", "properties": {"n": {"type": "number"}}}]},
    {"properties": {"s": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
    {"properties": {"s": {"type": "string"}}, "patternProperties": {"^n": {"type": "integer"}}},
]


@pytest.mark.parametrize("schema", ROOTS, ids=range(len(ROOTS)))
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n<parameter=s>\n7\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "glm45",
            "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n"
            "<arg_key>s</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
        ),
    ],
)
def test_values_have_the_types_that_the_root_of_a_schema_leads_to(name: str, text: str, schema: dict[str, Any]) -> None:
    parser, _ = made(name, (function("f", **schema),), "auto")
    found = fold(parser, [text])
    assert json.loads(found.calls[0].arguments) == {"n": 7, "s": "7"}


@pytest.mark.parametrize("schema", [{"$ref": "#/$defs/a", "$defs": CHAIN}, {"allOf": [{"$ref": "#"}]}, {"anyOf": 5}])
def test_a_root_that_leads_nowhere_says_nothing(schema: dict[str, Any]) -> None:
    assert described(schema) == ({}, None)


@pytest.fixture(scope="module", params=[Guidance, XGrammar])
def either(request: pytest.FixtureRequest) -> GrammarBackend:
    made: GrammarBackend = request.param(WORDS)
    return made


TAGGED = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:f{{a:<|"|>{}<|"|>}}<tool_call|>',
}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(("least", "most"), [(0, 1), (1, 1), (1, 3), (2, 3), (2, None)])
def test_strings_between_tags_have_their_length_and_may_hold_any_character(
    either: GrammarBackend, name: str, least: int, most: int | None
) -> None:
    bounds = {"minLength": least} if most is None else {"minLength": least, "maxLength": most}
    tools = (function("f", type="object", properties={"a": {"type": "string", **bounds}}, required=["a"]),)
    _, spec = made(name, tools, "required")
    assert spec is not None
    compiled = either.compile(spec)
    for text in ("", "a", "é", "ab", "a<", "<b", "\na", "a\n", "a\nb", "a<b", "<b>", "</b>", "<|b", "a <b"):
        whole = TAGGED[name].format(text).encode()
        right = least <= len(text) and (most is None or len(text) <= most)
        grammar = either.load(compiled)
        accepted = all(grammar.accept([byte]) for byte in whole) and bool(allowed(grammar, WORDS)[STOP])
        less = isinstance(either, XGrammar) and any(char in "\n<" for char in text)
        assert accepted is right or (less and not accepted), text
        if accepted:
            parser, _ = made(name, tools, "required")
            assert json.loads(fold(parser, list(whole.decode())).calls[0].arguments) == {"a": text}


def test_a_tag_begins_in_a_string_of_limited_length(either: GrammarBackend) -> None:
    tools = (function("f", properties={"a": {"type": "string", "minLength": 1, "maxLength": 99}}, required=["a"]),)
    _, spec = made("qwen3_coder", tools, "required")
    assert spec is not None
    tagged = ("a</param", "a</parameter>b", "<html>\n<p>1 < 2</p>\n</html>") if isinstance(either, Guidance) else ()
    for text in ("<p> 1 < 2", "if a < b:\n    c()\nd", *tagged):
        grammar = either.load(either.compile(spec))
        assert all(grammar.accept([byte]) for byte in TAGGED["qwen3_coder"].format(text).encode()), text


@pytest.mark.parametrize("text", ['"x', "[1", " a", "{", "\n[x", "a\n<b"])
@pytest.mark.parametrize("schema", [{"type": ["string", "null"]}, {}, {"anyOf": [{"maxLength": 9}, {"type": "null"}]}])
def test_an_enforced_string_that_may_be_null_is_read_as_it_is(schema: dict[str, Any], text: str) -> None:
    parser, _ = made("qwen3_coder", (function("f", properties={"a": schema}, required=["a"]),), "required")
    found = fold(parser, list(TAGGED["qwen3_coder"].format(text)))
    assert json.loads(found.calls[0].arguments) == {"a": text}


@pytest.mark.parametrize("space", ["", " "])
def test_the_tags_of_minicpm5_may_lack_their_space(space: str) -> None:
    text = f'So: <function{space}name="now"><param{space}name="a">1</param></function>.'
    found = fold(PARSERS["minicpm5"](TOOLS), list(text))
    assert [(call.name, call.arguments) for call in found.calls] == [("now", '{"a": "1"}')]


_NOW = '<|content_invoke_tool_json|>{"name":"now","args":{}}<|end_message|>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"now{_NOW}<|content_model_end_sampling|>", "", 1),
        (f"{_NOW}<|message_model|>now{_NOW}", "", 2),
        ("<|content_text|>Five.<|end_message|><|content_model_end_sampling|>", "Five.", 0),
        (f"<|content_text|>I ask.<|end_message|><|message_model|>now{_NOW}", "I ask.", 1),
        (f"now{_NOW}<|message_model|><|content_text|>Done.<|end_message|>", "Done.", 1),
        ("Just this. <|message_model|>now", "Just this. now", 0),
        ("now", "now", 0),
    ],
)
def test_messages_of_inkling_name_their_kind(text: str, content: str, calls: int) -> None:
    for step in (1, 7, len(text)):
        found = fold(PARSERS["inkling"](TOOLS), [text[at : at + step] for at in range(0, len(text), step)])
        assert (found.content, [call.name for call in found.calls]) == (content, ["now"] * calls)


OPEN = [
    {"$ref": "#/$defs/a", "$defs": {"a": {**N, "required": ["n"]}}},
    {
        "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"m": {"type": "integer"}}, "required": ["m"]}],
        "$defs": {"a": N},
    },
    {"anyOf": [{"properties": {"n": {"type": "integer"}}, "required": ["n"]}, {**N, "required": ["s"]}]},
    {**N, "anyOf": [{"required": ["n"]}, {"required": ["s"]}]},
    {"additionalProperties": {"type": "integer"}},
    {"additionalProperties": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "boolean"}}},
]


@pytest.mark.parametrize("schema", OPEN, ids=range(len(OPEN)))
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "deepseek_v32", "gemma4", "pythonic", "minicpm5"])
def test_open_roots_are_enforced_in_the_format(backend: Guidance, name: str, schema: dict[str, Any]) -> None:
    tools = (function("f", **schema),)
    for seed in range(3):
        parser, spec = made(name, tools, "required", parallel_tool_calls=False)
        assert isinstance(parser, PARSERS[name])
        assert spec is not None
        assert checked(parser, tools, generated(backend, name, spec, seed, length=20), size=7).calls


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [N, {"additionalProperties": False}]},
        {"allOf": [N, {"properties": {"n": {"type": "string"}}}]},
        {"anyOf": [{"properties": {"n": {"type": "integer"}}}, {"properties": {"n": {"type": "string"}}}]},
        {"anyOf": [N, {"type": "null"}]},
        {"oneOf": [N, {"properties": {"n": {"type": "integer"}}}]},
        {"$ref": "#/$defs/a", "$defs": CHAIN},
    ],
    ids=range(6),
)
@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4"])
def test_roots_that_a_format_cannot_say_are_enforced_as_json(name: str, schema: dict[str, Any]) -> None:
    parser, _ = made(name, (function("f", **schema),), "required")
    assert not isinstance(parser, PARSERS[name])
