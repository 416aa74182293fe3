"""Outputs that drift from their format: what is a call, and what never becomes content. The same in every cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ferrule.interfaces.parsers import ChoiceContext
from ferrule.plugin import discover
from ferrule_parsing import FormatParser
from ferrule_parsing.markup import MarkupFilter
from ferrule_testkit.kits.cuts import cuts
from ferrule_testkit.kits.parsers import Fold, fold

PLUGINS = discover()


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = (
    tool("get_weather", city="string"),
    tool("add", a="integer", b="integer"),
    tool("save", text="string", tags="array"),
    tool("bad", x="string"),
)


def read(name: str, text: str, tools: Any = TOOLS) -> Fold:
    def once(pieces: list[str]) -> Fold:
        parser = PLUGINS.load("tool_parser", name)(list(tools))
        parser.begin(ChoiceContext(tools=tools))
        return fold(parser, pieces)

    whole = once([text])
    for pieces in [list(text), *[*cuts(text)][::5]]:
        assert once(pieces).answer() == whole.answer(), pieces
    return whole


LA: tuple[str, Any] = ("get_weather", {"city": "LA"})
SUM: tuple[str, Any] = ("add", {"a": 1, "b": 2})
K2 = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
K2_CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
V3 = V31.replace("get_weather<｜tool▁sep｜>{}", "function<｜tool▁sep｜>get_weather\n```json\n{}\n```")
LFM2 = "<|tool_call_start|>{}<|tool_call_end|>"
GET = "[get_weather(city='LA')]"


def saved(tags: Any, text: Any) -> list[tuple[str, Any]]:
    return [("save", {"tags": tags, "text": text})]


def bad(x: str) -> tuple[str, Any]:
    return "bad", {"x": x}


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # words behind the tag are not calls
        ("mistral", "[TOOL_CALLS] not json", "not json", []),
        ("mistral", "[TOOL_CALLS] [1, 2]", "[1, 2]", []),
        ("mistral", "[TOOL_CALLS]get_weather", "get_weather", []),
        ("mistral", '[TOOL_CALLS]  junk [{"name":"add","arguments":{"a":1,"b":2}}]', "junk", [SUM]),
        ("mistral", '[TOOL_CALLS] see [1] and [{"name":"add","arguments":{"a":1,"b":2}}].', "see [1] and.", [SUM]),
        ("mistral", '[TOOL_CALLS]no[TOOL_CALLS]get_weather {"city": "LA"}', "no", [LA]),
        ("granite", '<|tool_call|>So: [{"name":"add","arguments":{"a":1,"b":2}}]', "So:", [SUM]),
        ("xlam", '[TOOL_CALLS][{"name":"add","arguments":{"a":1,"b":2}}]', "", [SUM]),
        ("xlam", "[TOOL", "[TOOL", []),
        # a mark that is the beginning of a longer one
        ("xlam", '[{"name":"add","arguments":{"a":1,"b":2}}]So.\n```json\n[{', "So.\n```json\n[{", [SUM]),
        ("xlam", '[{"name":"add","arguments":{"a":1,"b":2}}]```', "", [SUM]),
        ("minicpm5", "So. <function", "So.", []),
        # calls behind words have a number in front of their name, too
        (
            "cohere_command3",
            '<|START_ACTION|>So [{"tool_call_id":"0","tool_name":"add","parameters":{"a":1,"b":2}}]<|END_ACTION|>',
            "So",
            [SUM],
        ),
        # a number in the place of the name
        ("kimi_k2", K2.format(K2_CALL.format("0 ", '{"city":"LA"}')), "", [LA]),
        ("kimi_k2", K2.format(K2_CALL.format("1", '{"a":1,"b":2}')), "", [SUM]),
        ("kimi_k2", K2.format(K2_CALL.format("1", '{"q":1}')), '1{"q":1}', []),
        # stray tags
        ("kimi_k2", "Hi.<|tool_calls_section_end|> Bye.<|tool_calls_section_begin|>", "Hi. Bye.", []),
        ("kimi_k2", K2.format("None.") + "<|tool_call_section_end|>", "None.", []),
        ("deepseek_v3", V3.replace("{}", '{"city": "LA"'), "", [LA]),
        ("deepseek_v31", V31.replace("{}", '{"city": "LA"'), "", [LA]),
        # a fence that is mangled, or missing on one side
        *(
            ("deepseek_v3", V3.replace("\n```json\n{}\n```", f'{before}{{"city": "LA"}}{behind}'), "", [LA])
            for before in ("\n```json\n", "\n```\n", "\n``json\n", "\n````json\n", "\njson\n", "\n``` json", "\n", "")
            for behind in ("\n```", "", "\n``", "````", "\n```json\n```")
        ),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "LA"}\n</tool_call>', "", [LA]),
        ("cohere_command3", "It is <co>a</co: 0:[1,2],1:[0]> and <co: 1>b</co: 1>.", "It is a and b.", []),
        ("cohere_command3", "x <co: " + "y" * 200, "x <co: " + "y" * 200, []),
        ("glm45", "<tool_call> (here)</arg_value>", "(here)", []),
        # an echo is not a second call
        ("lfm2", LFM2.format(GET) + f"{GET}<|tool_call_end|>Done.", "Done.", [LA]),
        ("lfm2", LFM2.format(GET) + "[1] Done.", "[1] Done.", [LA]),
        ("lfm2", LFM2.format(GET) + LFM2.format("[add(a=1, b=2)]"), "", [LA, SUM]),
        # an argument that is not a value
        ("pythonic", "[bad(x=b'z'), get_weather(city='LA')]", "", [bad("b'z'"), LA]),
        ("pythonic", "[bad(x=f(1, 'a)', [2]) + 1), get_weather('LA')]", "", [bad("f(1, 'a)', [2]) + 1"), LA]),
        ("llama4_pythonic", "[add(1, 2, 3), get_weather(city='LA')]", "", [("add", {"a": 1, "b": 2, "arg2": 3}), LA]),
        ("olmo3", "<function_calls>\nbad(x=1 + 2)\nget_weather(city='LA')\n</function_calls>", "", [bad("1 + 2"), LA]),
        ("lfm2", LFM2.format("[save(tags={'a', 'b'}, text='It's fine, ok')]"), "", saved(["a", "b"], "It's fine, ok")),
        ("lfm2", LFM2.format('[save(tags={1, (2, 3)}, text="a "b" c")]'), "", saved([1, [2, 3]], 'a "b" c')),
        ("lfm2", LFM2.format("[save(tags={}, text={'a': {'b'}})]"), "", saved({}, {"a": ["b"]})),
        ("gemma4", "<|tool_call>call:bad{x:Los Angeles}<tool_call|>", "", [bad("Los Angeles")]),
        # Harmony without its tags
        ("openai", "commentary<|message|>Hi<|end|><|end|>", "Hi", []),
        ("openai", "<|channel|>commentary<|end|>Hi<|end|>", "Hi", []),
        ("openai", 'commentary to=functions.get_weather json<|message|>{"city": "LA"}<|call|>', "", [LA]),
        ("openai", "final answer: <|x|>", "final answer: <|x|>", []),
    ],
)  # fmt: skip
def test_what_is_a_call_and_what_is_content(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    found = read(name, text)
    assert found.content.strip() == content
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (name, text)
        for names, text in (
            ("hermes granite4 ernie45", "<tool_call>{}</tool_call>"),
            ("granite", "<|tool_call|>[{}]"),
            ("granite-20b-fc", "<function_call> {}"),
            ("jamba hunyuan_a13b", "<tool_calls>[{}]</tool_calls>"),
            ("xlam", "[{}]"),
            ("mistral", "[TOOL_CALLS][{}]"),
            ("phi4_mini_json", "functools[{}]"),
            ("llama3_json", "{}"),
            ("internlm", "<|action_start|><|plugin|>{}<|action_end|>"),
            ("lfm2", LFM2.replace("{}", "[{}]")),
        )
        for name in names.split()
    ],
)
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_both_keys_of_arguments_are_read(name: str, text: str, key: str) -> None:
    for call in (
        f'{{"name": "get_weather", "{key}": {{"city": "LA"}}}}',
        f'{{"{key}": {{"city": "LA"}}, "name": "get_weather"}}',
    ):
        if name == "llama3_json" and not call.startswith('{"name'):
            continue
        found = read(name, text.replace("{}", call))
        assert [(one.name, json.loads(one.arguments)) for one in found.calls] == [LA]


def test_undeclared_arguments_of_glm_are_json() -> None:
    values = {"a": "123", "b": "true", "c": "3.14", "d": "x y", "e": "[1]", "f": "007"}
    for name in ("glm45", "glm47"):
        written = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items())
        (call,) = read(name, f"<tool_call>other{written}</tool_call>").calls
        assert json.loads(call.arguments) == {"a": 123, "b": True, "c": 3.14, "d": "x y", "e": [1], "f": "007"}
        declared = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>123</arg_value></tool_call>"
        assert read(name, declared).calls[0].arguments == '{"city": "123"}'


def test_a_number_is_the_only_function() -> None:
    parser = PLUGINS.load("tool_parser", "kimi_k2")(list(TOOLS[:1]))
    found = fold(parser, list(K2.format(K2_CALL.format("3", "{}"))))
    assert ([call.name for call in found.calls], found.ids) == (["get_weather"], ["functions.get_weather:3"])


def test_an_id_that_the_model_writes_twice() -> None:
    """Make ids unique: answers to calls name the calls by their ids."""
    for name, call in (
        ("kimi_k2", K2.format(K2_CALL.format("functions.get_weather:0", '{"city":"LA"}'))),
        ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "LA"}'),
    ):
        parser = PLUGINS.load("tool_parser", name)(list(TOOLS))
        parser.begin(ChoiceContext(tools=TOOLS))
        found = fold(parser, [call, call, call])
        assert [call.name for call in found.calls] == ["get_weather"] * 3
        assert found.ids[0] in call
        assert len(set(found.ids)) == 3


SPECIAL = [
    (name, tag)
    for name in PLUGINS.names("tool_parser")
    if issubclass(PLUGINS.load("tool_parser", name), FormatParser)
    for tag in PLUGINS.load("tool_parser", name).special_tokens
    if tag[0] in "<[]"
]


@pytest.mark.parametrize(("name", "tag"), SPECIAL)
def test_special_tokens_never_become_content(name: str, tag: str) -> None:
    assert read(name, f"a {tag} b").content.split() == ["a", "b"]


def test_markup_is_left_out_in_every_cut() -> None:
    tags = ("<a>", "<ab>", ("<c:", ">"))
    for text, wanted in (
        ("x<a>y<ab>z<a", "xyz<a"),
        ("<c: 1>x<c:", "x<c:"),
        ("<<a>a>", "<a>"),
        (f"<c:{'1' * 130}>x<a>", f"<c:{'1' * 130}>x"),
        ("<c:<a>b", "b"),
    ):
        for pieces in cuts(text):
            kept = MarkupFilter(tags)
            assert "".join(map(kept.feed, pieces)) + kept.flush() == wanted
