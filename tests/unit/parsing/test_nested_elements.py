"""MiniMax M3 writes objects and lists as nested elements: what they become, and what is generated."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ferrule.forms import GrammarSpec
from ferrule.frontend.output.parse import ParseChain, Parsers
from ferrule.interfaces.guided_decoding import GrammarBackend
from ferrule.interfaces.parsers import ChoiceContext
from ferrule_plugins.guided_decoding.guidance import Guidance
from ferrule_plugins.guided_decoding.xgrammar import XGrammar
from ferrule_plugins.tool_parser.minimax_m3 import MiniMaxM3
from ferrule_testkit.kits.cuts import cuts
from ferrule_testkit.kits.guided_texts import allowed
from ferrule_testkit.kits.parsers import Fold, fold
from tests.unit.parsing.test_formats import STOP, WORDS, checked, function, generated

MARK = "]<]minimax[>["
PLACE: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}}
LINES = {"type": "array", "items": {"type": "object", "properties": {"sku": {"type": "string"}, "n": {}}}}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "note": {"type": "string"},
        "to": {"$ref": "#/$defs/place"},
        "lines": LINES,
        "tags": {"type": "array", "items": {"type": "string"}},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "meta": {"type": "object", "additionalProperties": {"type": "number"}},
        "free": {"type": "object"},
        "either": {"anyOf": [{"type": "array", "items": {"type": "boolean"}}, {"type": "null"}]},
        "said": {"type": ["string", "null"]},
    },
    "$defs": {"place": PLACE},
}
TOOLS = (function("order", **ORDER), function("now"))


def element(name: str, inside: str) -> str:
    return f"{MARK}<{name}>{inside}{MARK}</{name}>"


def items(*each: str) -> str:
    return "".join(element("item", one) for one in each)


def block(inside: str, name: str = "order") -> str:
    return f'{MARK}<tool_call>\n{MARK}<invoke name="{name}">{inside}{MARK}</invoke>\n{MARK}</tool_call>'


def read(text: str) -> Fold:
    """Parse a text in every cut, with the same result."""

    def once(pieces: list[str]) -> Fold:
        parser = MiniMaxM3(TOOLS)
        parser.begin(ChoiceContext(tools=TOOLS))
        return fold(parser, pieces)

    whole = once([text])
    for pieces in [list(text), *[*cuts(text)][::5]]:
        assert once(pieces).answer() == whole.answer(), pieces
    return whole


ID, TO = element("id", "1"), element("to", element("city", "Oslo") + element("zip", "150"))
WHERE = {"city": "Oslo", "zip": 150}


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", {}),
        (ID + TO, {"id": 1, "to": WHERE}),
        (
            element("lines", items(element("sku", "7") + element("n", "7"), element("sku", "b"))),
            {"lines": [{"sku": "7", "n": 7}, {"sku": "b"}]},
        ),
        (f"\n{MARK}<sizes>\n{items('1', '2')}\n{MARK}</sizes>\n", {"sizes": [1, 2]}),
        (element("tags", "") + element("free", "\n") + element("note", "\n"), {"tags": [], "free": {}, "note": "\n"}),
        (element("tags", '["a", "b"]') + element("free", '{"a": 1}'), {"tags": ["a", "b"], "free": {"a": 1}}),
        (element("meta", element("a", "1") + element("b", "2.5")), {"meta": {"a": 1, "b": 2.5}}),
        (element("free", element("a", "1") + element("b", items("1"))), {"free": {"a": "1", "b": ["1"]}}),
        (element("other", element("a", element("a", "x"))), {"other": {"a": {"a": "x"}}}),
        (element("either", items("true")), {"either": [True]}),
        (element("either", "null") + element("said", "null"), {"either": None, "said": None}),
        (element("said", "a <b> c") + element("note", "<note>"), {"said": "a <b> c", "note": "<note>"}),
        # elements where the schema has none, or others
        (element("note", element("a", "1")), {"note": {"a": "1"}}),
        (element("sizes", element("x", "1") + element("x", "2")), {"sizes": [1, 2]}),
        (element("to", items("a")), {"to": {"item": "a"}}),
        (element("tags", "a") + element("tags", "b") + ID, {"tags": ["a", "b"], "id": 1}),
        (element("id", "1") + element("id", "2") + TO, {"id": 1, "to": WHERE}),
        (TO + element("to", element("city", "Rome") + element("x", items("a"))) + ID, {"to": WHERE, "id": 1}),
        # tags that are missing, misspelt or too many
        (f"{MARK}<note>a{TO}", {"note": "a", "to": WHERE}),
        (TO.removesuffix(f"{MARK}</to>") + ID, {"to": WHERE, "id": 1}),
        (element("tags", f"{MARK}<item>a{MARK}<item>b"), {"tags": ["a", "b"]}),
        (
            element("lines", f"{MARK}<item>{element('sku', 'a')}{items(element('n', '1'))}"),
            {"lines": [{"sku": "a"}, {"n": 1}]},
        ),
        (f"{MARK}<lines>{MARK}<item>{MARK}<sku>a", {"lines": [{"sku": "a"}]}),
        (f"{ID}{MARK}</more>{TO}", {"id": 1, "to": WHERE}),
        (f"{MARK} <id>1{MARK}\n</id>", {"id": 1}),
        (element("note", f"a{MARK}<b>c{MARK}</b>{MARK}"), {"note": f"a{MARK}<b>c{MARK}</b>{MARK}"}),
    ],
)
def test_arguments(inside: str, arguments: dict[str, Any]) -> None:
    found = read(f"Now. {block(inside)} Done.")
    assert found.content == "Now. Done."
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("order", arguments)]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f'{MARK}<tool_call>{MARK}<invoke name="order">{TO}{MARK}</tool_call>So.', "So.", [{"to": WHERE}]),
        (f'{MARK}<tool_call>{MARK}<invoke name="order">{MARK}<note>a{block(ID)}', "", [{"note": "a"}, {"id": 1}]),
        (block(f"{ID} so {TO}"), "so Oslo150", [{"id": 1}]),
        (f"a {MARK}<tool_call> b {MARK}</x> c {MARK} d", "a b c d", []),
        (block(f"{MARK}<>{ID}"), "1", [{}]),
        (block(element("a" * 257, "1")), f"<{'a' * 257}>1</{'a' * 257}>", [{}]),
    ],
)
def test_what_ends_calls(text: str, content: str, calls: list[Any]) -> None:
    found = read(text)
    assert [json.loads(call.arguments) for call in found.calls] == calls
    assert MARK not in found.content
    assert "".join(found.content.split()).replace("<", "") == content.replace(" ", "").replace("<", "")


def test_levels_are_limited() -> None:
    (call,) = fold(MiniMaxM3(TOOLS), [block(f"{MARK}<a>" * 10_000)]).calls
    assert call.arguments.count("{") == call.arguments.count("}") == 65


def test_what_streams() -> None:
    """Stream strings as they are written, at every level."""
    text = f'{MARK}<tool_call>\n{MARK}<invoke name="order">{MARK}<to>{MARK}<city>Os'
    assert fold(MiniMaxM3(TOOLS), [text], finish=False).calls[0].arguments == '{"to": {"city": "Os'


@pytest.fixture(scope="module", params=[Guidance, XGrammar])
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    made: GrammarBackend = request.param(WORDS)
    return made


def made(tools: Any, choice: str, **more: Any) -> tuple[MiniMaxM3, GrammarSpec]:
    chain = ParseChain(Parsers(tools=MiniMaxM3), tools, ChoiceContext(tools=tools, tool_choice=choice, **more))
    assert chain.constraint is not None
    assert isinstance(chain.tools, MiniMaxM3), "JSON takes the place of the format"
    return chain.tools, chain.constraint


def accepts(backend: GrammarBackend, spec: GrammarSpec, text: str) -> bool:
    """Return whether a constraint allows a whole text."""
    grammar = backend.load(backend.compile(spec))
    return all(grammar.accept([byte]) for byte in text.encode()) and bool(allowed(grammar, WORDS)[STOP])


TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "in": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 1},
    },
    "required": ["name"],
    "additionalProperties": False,
}
FLAGS = {"type": "array", "items": {"type": "boolean"}, "minItems": 1}
STRICT: list[dict[str, Any]] = [
    {"properties": {"a": LINES}, "required": ["a"]},
    {"properties": {"a": {"$ref": "#/$defs/t"}}, "required": ["a"], "$defs": {"t": TREE}},
    {"properties": {"a": {"type": "object", "additionalProperties": {"type": "integer"}}}, "required": ["a"]},
    {"properties": {"a": {"enum": ["x", None, 5, "<y>"]}, "b": {"const": "c"}}, "required": ["a", "b"]},
    {"properties": {"a": {"anyOf": [FLAGS, {"type": "null"}]}}, "required": ["a"]},
    {"properties": {"a b": {"type": "array", "items": {"type": "array", "items": PLACE, "maxItems": 2}}}},
    {
        "anyOf": [
            {"properties": {"n": {"type": "integer"}}, "required": ["n"]},
            {"properties": {"t": PLACE}, "required": ["t"]},
        ]
    },
]


@pytest.mark.parametrize("schema", STRICT, ids=range(len(STRICT)))
def test_enforced_calls_are_valid_at_every_level(backend: GrammarBackend, schema: dict[str, Any]) -> None:
    tools = (function("f", **{"type": "object", **schema}),)
    for seed in range(3):
        parser, spec = made(tools, "required", parallel_tool_calls=False)
        text = generated(backend, "minimax_m3", spec, seed, length=40)
        found = checked(parser, tools, text, size=1 + seed * 6)
        assert [call.name for call in found.calls] == ["f"], text
        assert not found.content.strip(), text


ALSO_SIZE = {"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 3}]}
OTHER_PLACE = {"type": "object", "properties": {"city": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": ["string", "array"]}}},
        {"properties": {"a": {"type": "string", "pattern": "^a$"}}},
        {"properties": {"a": {"type": "array", "items": ALSO_SIZE}, "b": ALSO_SIZE}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"enum": [1, 2]}]}}},
        {"properties": {"a>b": {"type": "integer"}}},
        {"properties": {"tool_call": {"type": "integer"}}},
        {"properties": {"a": {}}, "minProperties": 1},
        {"anyOf": [{"properties": {"a": PLACE}}, {"properties": {"a": OTHER_PLACE}}]},
    ],
    ids=range(8),
)
def test_what_elements_cannot_say_is_enforced_as_json(schema: dict[str, Any]) -> None:
    tools = (function("f", **{"type": "object", **schema}),)
    chain = ParseChain(Parsers(tools=MiniMaxM3), tools, ChoiceContext(tools=tools, tool_choice="required"))
    assert chain.tools is not None
    assert not isinstance(chain.tools, MiniMaxM3)


def test_json_in_an_element_may_hold_tags(backend: GrammarBackend) -> None:
    tools = (function("f", type="object", properties={"a": {"type": "object"}, "b": {"type": "integer"}}),)
    parser, spec = made(tools, "required")
    value = {"x": f"{MARK}</a>{MARK}</invoke>"}
    text = block(element("a", json.dumps(value)) + element("b", "2"), "f")
    assert accepts(backend, spec, text)
    assert json.loads(fold(parser, list(text)).calls[0].arguments) == {"a": value, "b": 2}


def test_functions_beside_a_strict_one_take_any_arguments(backend: GrammarBackend) -> None:
    strict = function("f", strict=True, type="object", properties={"a": {"type": "integer"}})
    parser, spec = made((strict, function("order", **ORDER)), "auto")
    text = "So. " + block(TO + element("more", items("a")), "order")
    assert accepts(backend, spec, text)
    assert json.loads(fold(parser, [text]).calls[0].arguments) == {"to": WHERE, "more": ["a"]}
    assert not accepts(backend, spec, block(element("a", "x"), "f"))


def test_the_form_of_a_schema_is_of_limited_size() -> None:
    """Limit the form of a schema in which each definition names the next one ten times."""
    chain: dict[str, Any] = {
        f"d{at}": {"type": "object", "properties": {f"p{n}": {"$ref": f"#/$defs/d{at + 1}"} for n in range(10)}}
        for at in range(8)
    }
    definitions = {**chain, "d8": {"type": "integer"}}
    tools = (function("f", **{"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}),)
    _, spec = made(tools, "required")
    assert repr(spec.form).count("Fixed(") < 20_000
