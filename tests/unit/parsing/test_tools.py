"""`hermes`, and the parts that tool parsers are made of."""

from __future__ import annotations

import json
import re
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, Event, TextDelta
from ferrule_parsing import CallWriter, ObjectReader, Reader, Tags
from ferrule_plugins.tool_parser.hermes import Hermes
from ferrule_testkit.kits import ToolParserKit
from ferrule_testkit.kits.count import work
from tests.shared import grid

Result = tuple[str, list[tuple[str, str]]]  # content, and (name, arguments) of each call


class TestHermes(ToolParserKit):
    """Every promise of the kit, with the samples that the class names."""

    plugin = Hermes


def run(*pieces: str) -> list[Event]:
    parser = Hermes([])
    events = [event for piece in pieces for event in parser.feed(TextDelta(piece))]
    return [*events, *parser.finish()]


def result(events: list[Event]) -> Result:
    """Join events, and check the order: arguments and an end belong to the call that is open."""
    calls: list[list[str]] = []
    content, opened = "", None
    for event in events:
        match event:
            case Content(text):
                assert text
                content += text
            case CallStart(index, _, name):
                assert (index, opened) == (len(calls), None)
                opened = index
                calls.append([name, ""])
            case CallArguments(index, fragment):
                assert index == opened
                assert fragment
                calls[index][1] += fragment
            case CallEnd(index):
                assert index == opened
                opened = None
    assert opened is None
    return content, [(name, arguments) for name, arguments in calls]


def read(text: str) -> Result:
    """Parse a text in one piece and in single characters, with the same result."""
    whole = result(run(text))
    assert result(run(*text)) == whole
    return whole


def call(name: str = "f", arguments: str = '{"a": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# ------------------------------------------------------------------------------------------- what a call is


@pytest.mark.parametrize(
    "arguments",
    ["{}", '{"a": {"b": [1, {"c": "}]"}]}}', r'{"a": "\\", "b": "\"}</tool_call>"}', '{"a": "ü\\u00fc"}', '{ "a" :1 }'],
)
def test_arguments_come_as_they_were_written(arguments: str) -> None:
    assert read(call(arguments=arguments)) == ("", [("f", arguments)])


@pytest.mark.parametrize(
    ("member", "arguments"),
    [
        ("", "{}"),
        (', "arguments": null', "{}"),
        (r', "arguments": "{\"a\": 1}"', '{"a": 1}'),
        (', "arguments": [1, 2]', "[1, 2]"),
        (', "arguments": 12', "12"),
        (', "id": "x", "arguments": {"a": 1}, "more": {"arguments": {"b": 2}}', '{"a": 1}'),
        (', "arguments": {"a": 1}, "arguments": {"b": 2}, "name": "g"', '{"a": 1}'),
    ],
)
def test_members(member: str, arguments: str) -> None:
    assert read(f'<tool_call>{{"name": "f"{member}}}</tool_call>') == ("", [("f", arguments)])
    first = f'<tool_call>{{{member.removeprefix(", ")}{", " if member else ""}"name": "f"}}</tool_call>'
    assert read(first)[1][0][1] == arguments


def test_a_name_may_be_escaped() -> None:
    assert read('<tool_call>{"na\\u006de": "get\\u005fx\\"", "arguments": {}}</tool_call>') == ("", [('get_x"', "{}")])


def test_the_name_comes_at_once_and_arguments_as_they_come() -> None:
    parser = Hermes([])
    assert parser.feed(TextDelta('<tool_call>\n{"name": "f')) == []
    (start,) = parser.feed(TextDelta('"'))
    assert isinstance(start, CallStart)
    assert re.fullmatch("call_[0-9a-f]{24}", start.id)
    assert parser.feed(TextDelta(', "arguments": ')) == []
    assert parser.feed(TextDelta('{"a": "x')) == [CallArguments(0, '{"a": "x')]
    assert parser.feed(TextDelta("y")) == [CallArguments(0, "y")]
    assert parser.feed(TextDelta('"}}')) == [CallArguments(0, '"}'), CallEnd(0)]
    assert parser.feed(TextDelta("\n</tool_call>")) == []
    assert parser.finish() == []


def test_arguments_before_the_name_wait_for_it() -> None:
    parser = Hermes([])
    assert parser.feed(TextDelta('<tool_call>{"arguments": {"a": 1}, "name": ')) == []
    events = parser.feed(TextDelta('"f"}'))
    assert result(events) == ("", [("f", '{"a": 1}')])


# ------------------------------------------------------------------------------------------- text around calls


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (f"Before.\n{call()}", "Before.", 1),
        (f"{call()}\nafter", "after", 1),
        (f"before\n{call()}\n after\n", "before\n after\n", 1),
        (f"{call()}\n{call()}\n", "", 2),
        (f"{call()}{call()}", "", 2),
        (f"a {call()} b {call()} c", "a b c", 2),
        (f"a{call()}b", "ab", 1),
        (" \n", " \n", 0),
        (f"\n\n{call()}", "", 1),
        ("a < b <tool <tool_call", "a < b <tool <tool_call", 0),
        ("</tool_call> x", "</tool_call> x", 0),
    ],
)
def test_text_around_calls(text: str, content: str, count: int) -> None:
    found, calls = read(text)
    assert (found, len(calls)) == (content, count)


# ------------------------------------------------------------------------------------------- broken calls


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>get_weather(city)</tool_call>",
        "<tool_call>\n</tool_call>",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call> and on',
        "<tool_call>{'name': 'f'}</tool_call>",
        '<tool_call>[{"name": "f"}]</tool_call>',
        '<tool_call>{"name" "f"}</tool_call>',
        '<tool_call>{"name": f}</tool_call>',
        "x <tool_call> y",
        '<tool_call>{"arguments": {"a": 1',
        '<tool_call>{"name": "f',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert read(text) == (text, [])


def test_a_call_after_a_broken_one_is_found() -> None:
    assert read(f"<tool_call> <tool_call>no {call()}") == ("<tool_call> <tool_call>no", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
        ('<tool_call>{"name": "f", "arguments": "{\\"a', ("", [("f", '"{\\"a')])),
        ('<tool_call>{"name": "f"', ("", [("f", "")])),
        ('<tool_call>{"name": "f", \'arguments\'}', ("'arguments'}", [("f", "")])),
        (call().removesuffix("</tool_call>") + "Next " + call(), ("Next", [("f", '{"a": 1}')] * 2)),
        (call().replace("\n</", "}\n</") + " x", ("} x", [("f", '{"a": 1}')])),
        (call() + "</tool_call>", ("</tool_call>", [("f", '{"a": 1}')])),
        (call().removesuffix("call>"), ("", [("f", '{"a": 1}')])),
    ],
)
def test_calls_that_break_off(text: str, expected: Result) -> None:
    assert read(text) == expected


# ------------------------------------------------------------------------------------------- any cut, any text


def test_every_cut_in_up_to_four_pieces() -> None:
    text = f'a <tool_call>{{"name": "f", "arguments": {{"b": "\\"}}"}}}}</tool_call> {call()}'
    whole = result(run(text))
    assert whole == ("a", [("f", '{"b": "\\"}"}'), ("f", '{"a": 1}')])
    places = range(1, len(text))
    for first in places:
        assert result(run(text[:first], text[first:])) == whole
    for places_of in list(combinations(places, 3))[::23]:
        pieces = [text[start:stop] for start, stop in zip((0, *places_of), (*places_of, len(text)), strict=True)]
        assert result(run(*pieces)) == whole


PARTS = (
    "<tool_call>",
    "</tool_call>",
    "{",
    "}",
    '"',
    "\\",
    ":",
    ",",
    '"name"',
    '"f"',
    '"arguments"',
    "[",
    "]",
    " ",
    "\n",
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from((*PARTS, "a", "<", call(), call("g", "{}"))), max_size=25), st.data())
def test_any_text_in_any_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = read(text)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:stop] for start, stop in zip((0, *places), (*places, len(text)), strict=True)]
    assert result(run(*pieces)) == whole
    if "<tool_call>" not in text:
        assert whole == (text, [])


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.recursive(st.text(max_size=5) | st.integers() | st.none(), st.lists)))
def test_any_arguments_survive(arguments: dict[str, object]) -> None:
    for ascii_only in (True, False):
        text = json.dumps(arguments, ensure_ascii=ascii_only)
        assert read(call(arguments=text)) == ("", [("f", text)])


ADVERSE = (
    "<tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": [',
    '<tool_call>{"a":',
    '<tool_call>{"name": "f", "arguments": "\\"',
    "</tool_call>",
    call(),
    "<",
    "\n",
    '"',
    "{",
    "\\",
)


@pytest.mark.advisory("CVE-2025-48887")
@grid({"unit": ADVERSE, "prefix": ("", '<tool_call>{"name": "f", "arguments": {"a": "', '<tool_call>{"a": {"')})
def test_work_grows_with_the_text_and_no_faster(unit: str, prefix: str) -> None:
    def cost(size: int, step: int) -> int:
        text = prefix + unit * (size // len(unit))
        return work(lambda: run(*(text[at : at + step] for at in range(0, len(text), step))))

    for size, step in ((1024, 1), (4096, 64), (4096, 1 << 20)):
        assert cost(2 * size, step) < 2.3 * cost(size, step) + 200


@pytest.mark.parametrize("unit", ADVERSE)
def test_a_long_text_of_it(unit: str) -> None:
    text = unit * ((1 << 18) // len(unit))
    for step in (1 << 18, 4096):
        content, calls = result(run(*(text[at : at + step] for at in range(0, len(text), step))))
        assert len(content) + sum(len(arguments) for _, arguments in calls) > 0 or not unit.strip()
    if not calls:
        assert content == text


# ------------------------------------------------------------------------------------------- parts


def test_tags_prefer_the_first_and_then_the_longer() -> None:
    reader = Reader()
    reader.push("a<b>c<bb")
    tags = Tags("<b>", "<bb>", "<bb>>")
    assert reader.until(tags) == ("a", "<b>")
    assert reader.until(tags) == ("c", "")
    reader.push(">>d<")
    assert reader.until(tags) == ("", "<bb>>")
    assert reader.until(tags) == ("d", "")
    assert (reader.empty, reader.rest(), reader.empty) == (False, "<", True)
    with pytest.raises(ValueError, match="empty"):
        Tags("a", "")


def test_a_reader_takes_a_tag_only_where_it_stands() -> None:
    reader = Reader()
    reader.push("  <t")
    assert reader.space() == "  "
    assert reader.take("<tag>") is None
    assert reader.take("<u") is False
    reader.push("ag>")
    assert reader.take("<tag>") is True
    assert reader.match(re.compile("x")) == ""


def test_an_object_is_cut_into_its_members() -> None:
    text = ' {"a": [1, "]"], "b": -1.5e3, "c" : "x\\"y"} rest'
    for size in (1, 2, 3, 100):
        reader, values, at = ObjectReader(), {}, 1
        for start in range(1, len(text), size):
            at = start
            piece = text[start : start + size]
            at += reader.feed(piece)
            for key, part, _ in reader.take():
                values[key] = values.get(key, "") + part
            if reader.done:
                break
        assert text[at:] == " rest"
        assert values == {"a": '[1, "]"]', "b": "-1.5e3", "c": '"x\\"y"'}


@pytest.mark.parametrize("text", ["x", "{a", '{"a",', '{"a": ,', '{"a": 1 2', '{"a": 1; x'])
def test_an_object_that_fails_says_where(text: str) -> None:
    reader = ObjectReader()
    assert reader.feed(text) < len(text)
    assert reader.failed


def test_a_writer_ends_what_it_starts() -> None:
    writer = CallWriter()
    writer.start("f")
    assert writer.open
    writer.start("g")
    writer.finish()
    kinds = [type(event) for event in writer.take()]
    assert kinds == [CallStart, CallEnd, CallStart, CallEnd]
    assert writer.take() == []
