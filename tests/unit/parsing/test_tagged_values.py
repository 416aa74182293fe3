"""Values between tags: what is missing or misspelt around them, and values that hold such tags themselves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from ferrule.interfaces.parsers import ChoiceContext
from ferrule.plugin import discover
from ferrule_testkit.kits.cuts import cuts
from ferrule_testkit.kits.parsers import Fold, fold

PLUGINS = discover()


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = (
    tool("get_weather", city="string", days="integer"),
    tool("write", path="string", text="string"),
    tool("now"),
    {"type": "function", "function": {"name": "free", "parameters": {"type": "object"}}},
)


def read(name: str, text: str, every: bool = True) -> tuple[str, list[tuple[str, Any]]]:
    """Return content and calls, the same in every cut, with arguments that are JSON."""

    def once(pieces: list[str]) -> Fold:
        parser = PLUGINS.load("tool_parser", name)(list(TOOLS))
        parser.begin(ChoiceContext(tools=TOOLS))
        return fold(parser, pieces)

    whole = once([text])
    for pieces in [list(text), *([*cuts(text)][:: 17 if every else 97])]:
        assert once(pieces).answer() == whole.answer(), pieces
    return whole.content, [(call.name, json.loads(call.arguments)) for call in whole.calls]


@dataclass(frozen=True)
class Format:
    """A format of calls. `call` has a place for the name and the arguments; `end` ends a value."""

    name: str
    call: str
    argument: str
    end: str

    def write(self, name: str, **values: Any) -> str:
        return self.call.format(name, "".join(self.argument.format(key, value) for key, value in values.items()))


def _dsml(tag: str) -> str:
    return tag.replace("<", "<｜DSML｜").replace("<｜DSML｜/", "</｜DSML｜")


_INVOKE = '<invoke name="{}">\n{}</invoke>'
FORMATS = [
    *(
        Format(
            name,
            "<tool_call>\n<function={}>\n{}</function>\n</tool_call>",
            "<parameter={}>\n{}\n</parameter>\n",
            "</parameter>",
        )
        for name in ("qwen3_coder", "qwen3_xml")
    ),
    *(
        Format(
            name,
            f"<tool_call>{{}}{gap}{{}}</tool_call>",
            f"<arg_key>{{}}</arg_key>{gap}<arg_value>{{}}</arg_value>{gap}",
            "</arg_value>",
        )
        for name, gap in (("glm45", "\n"), ("glm47", ""))
    ),
    Format(
        "minimax_m2",
        f"<minimax:tool_call>\n{_INVOKE}\n</minimax:tool_call>",
        '<parameter name="{}">{}</parameter>\n',
        "</parameter>",
    ),
    Format(
        "seed_oss",
        "<seed:tool_call>\n<function={}>\n{}</function>\n</seed:tool_call>",
        "<parameter={}>{}</parameter>\n",
        "</parameter>",
    ),
    Format(
        "step3",
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">\n{}'
        "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
        '<steptml:parameter name="{}">{}</steptml:parameter>\n',
        "</steptml:parameter>",
    ),
    Format(
        "deepseek_v32",
        _dsml(f"<function_calls>\n{_INVOKE}\n</function_calls>"),
        _dsml('<parameter name="{}" string="true">{}</parameter>\n'),
        "</｜DSML｜parameter>",
    ),
]
each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def test_a_key_that_is_not_closed() -> None:
    text = "<tool_call>get_weather\n<arg_key>city\n<arg_value>Rome</arg_value>\n</tool_call>\nThe answer is 42."
    for name in ("glm45", "glm47"):
        assert read(name, text) == ("The answer is 42.", [("get_weather", {"city": "Rome"})])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city\nRome\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "seed_oss",
            "<seed:tool_call><function=get_weather><parameter=city\nRome</parameter></function></seed:tool_call>",
        ),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="get_weather"><parameter name="city\nRome</parameter></invoke>',
        ),
    ],
)
def test_a_key_whose_end_is_missing(name: str, text: str) -> None:
    assert read(name, text + "\nThe answer is 42.") == ("The answer is 42.", [("get_weather", {"city": "Rome"})])


@each_format
def test_a_key_that_is_too_long_is_content(format: Format) -> None:
    long = "k" * 300
    text = format.write("get_weather", city="Rome", **{long: "x"}) + "\nThe answer is 42."
    content, calls = read(format.name, text, every=False)
    assert calls == [("get_weather", {"city": "Rome"})]
    assert long in content
    assert content.endswith("The answer is 42.")


@each_format
def test_text_in_place_of_an_argument(format: Format) -> None:
    """Return JSON for what is broken after the name, and content for what follows the call."""
    text = format.write("get_weather", city="Rome").replace(format.end, f"{format.end} no {format.end}")
    content, calls = read(format.name, text.replace(" no ", "") + "\nThe answer is 42.")
    assert (content.split("\n")[-1], calls[0][0]) == ("The answer is 42.", "get_weather")
    content, calls = read(format.name, format.write("now").replace("now", "now?"))
    assert calls == [] or calls[0][1] == {}


@each_format
def test_a_value_that_is_not_closed(format: Format) -> None:
    """End it at another argument on a line of its own; where text follows the call, also at the call's end."""
    text = format.write("get_weather", city="Rome\n", days="3\n")
    for count in (1, 2):
        open = text.replace(format.end, "", count)
        open = open if "\n" in format.argument else open.replace("<arg_key>days", "\n<arg_key>days")
        content, calls = read(format.name, open + "\nThe answer is 42.")
        assert (content, calls[0][0]) == ("The answer is 42.", "get_weather")
        assert {key: str(value).strip() for key, value in calls[0][1].items()} == {"city": "Rome", "days": "3"}


@each_format
def test_a_value_that_the_end_of_the_call_closes(format: Format) -> None:
    """End the value also on its own line, and with another call after it."""
    call = format.write("get_weather", city="Rome").strip().replace("\n", "")
    head, end, tail = call.partition(format.end)
    assert read(format.name, f"{head}{tail}") == ("", [("get_weather", {"city": "Rome"})])
    assert read(format.name, f"{head}{tail}\nDone.") == ("Done.", [("get_weather", {"city": "Rome"})])
    for other in (format.write("now"), call):
        content, calls = read(format.name, f"{head}{tail}{other}")
        assert (content, len(calls), calls[0]) == ("", 2, ("get_weather", {"city": "Rome"}))


@each_format
@pytest.mark.parametrize("drift", ["1>", "", "_city>"])
def test_a_misspelt_closing_tag_is_not_a_part_of_the_value(format: Format, drift: str) -> None:
    text = format.write("get_weather", city="Rome", days="3").replace(format.end, format.end[:-1] + drift)
    if drift == "" and format.name == "glm47":
        text = text.replace("</arg_value", "</arg_value\n")
    expected = {"city": "Rome", "days": 3 if format.name != "deepseek_v32" else "3"}
    assert read(format.name, text) == ("", [("get_weather", expected)])


@each_format
@pytest.mark.parametrize(
    "kind", ["call", "argument", "same argument", "closing tag", "text and call", "two calls", "unbalanced"]
)
def test_a_value_may_be_about_the_format_itself(format: Format, kind: str) -> None:
    call, argument = format.write("get_weather", city="Oslo"), format.argument.format("path", "x")
    written = {
        "call": call,
        "argument": format.argument.format("city", "x") + "is how",
        "same argument": f"First\n{argument}and so on",
        "closing tag": f"It ends with {format.end} and no other",
        "text and call": f"So:\n{call}\nThen it stops.\n",
        "two calls": f"{call}\n{format.write('now')}\nThat's all",
        "unbalanced": f"{call.partition('Oslo')[0]} is how it begins",
    }[kind]
    text = format.write("write", path="a.md", text=f"\n{written}\n")
    found = [("write", {"path": "a.md", "text": f"\n{written}\n"})]
    assert read(format.name, text) == ("", found)
    content, calls = read(format.name, f"{text}\nDone.")
    assert (content, calls) == ("Done.", found)


@each_format
def test_two_calls_with_values_about_the_format(format: Format) -> None:
    one = format.write("write", path="a.md", text=f"So:\n{format.write('get_weather', city='Oslo')}.")
    content, calls = read(format.name, f"{one}\n{one}")
    assert (content, [call[0] for call in calls]) == ("", ["write", "write"])
    assert calls[0] == calls[1]


@each_format
def test_a_key_that_was_given_is_text(format: Format) -> None:
    text = format.write("get_weather", city=f"a{format.end}\n{format.argument.format('city', 'b')}c")
    _, calls = read(format.name, text)
    assert [name for name, _ in calls] == ["get_weather"]
    assert calls[0][1]["city"].endswith("c")
