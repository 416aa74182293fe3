"""The chat templates that come with Ferrule: headers, names, what they show, and that parsers read their calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ferrule.errors import ConfigError, RequestError
from ferrule.frontend.output.parse import ParseChain, Parsers
from ferrule.frontend.template_fit import generated
from ferrule.frontend.text.builtin import builtin_templates, choose_templates, find_builtin, fitting, read_header
from ferrule.frontend.text.messages import read_messages, read_tools
from ferrule.frontend.text.template import RenderJob, render, work
from ferrule.interfaces.parsers import CallArguments, CallStart, ChoiceContext
from ferrule.plugin import discover
from tools import ROOT

PLUGINS = discover()
TEMPLATES = builtin_templates()
WITH_TOOLS = sorted(name for name, template in TEMPLATES.items() if template.parser)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PROPERTIES = {
    "city": {"type": "string", "description": "Where — “city”"},
    "note": {"type": "string"},
    "days": {"type": "integer"},
    "ratio": {"type": "number"},
    "exact": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "filter": {"type": "object"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search_places",
            "description": "Search places. Second sentence",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
NESTED = {
    "city": "São Paulo, 東京 🙂",
    "note": 'She said "no", it\'s C:\\temp\nand <b>left</b> [1, {2}]; a=b',
    "days": 3,
    "ratio": 0.25,
    "exact": True,
    "tags": ["a", "b, c", 'd"e'],
    "filter": {"deep": {"x": [1, {"y": None}], "on": False}, "é": "ü", "empty": {}},
}
SYSTEM = {"role": "system", "content": "SYS-TEXT"}
USER = {"role": "user", "content": "USER1"}


def call(name: str, arguments: dict[str, Any] | str, number: int = 0) -> dict[str, Any]:
    return {
        "id": f"call_0a1b2c3d4e5f6{number:03}",
        "type": "function",
        "function": {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)},
    }


def calling(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(content: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_0a1b2c3d4e5f6{number:03}", "content": content}


def shown(
    name: str, *messages: dict[str, Any], tools: list[dict[str, Any]] | None = TOOLS, begin: bool = True, **extra: Any
) -> str:
    variables = {
        **TOKENS,
        "tools": read_tools(tools) if tools else None,
        "documents": None,
        "add_generation_prompt": begin,
    }
    rendering = render(
        RenderJob(
            template=TEMPLATES[name].text,
            messages=read_messages(messages, 100_000),
            variables=variables,
            extra=extra,
            content_format="auto",
            max_characters=100_000,
        )
    )
    assert not rendering.lost
    return rendering.text


def of_model(name: str, *messages: dict[str, Any]) -> str:
    """Return the text that the model generated for the last message."""
    history = messages[:-1]
    end = shown(name, *history, {"role": "assistant", "content": "SAID"}, begin=False).rpartition("SAID")[2]
    texts = generated(
        shown(name, *history), shown(name, *history, begin=False), shown(name, *messages, begin=False), end
    )
    assert len(texts) == 1  # the beginning of an answer is the one that earlier answers have
    return texts[0]


def read(parser: str, text: str, size: int, prompt: str) -> list[tuple[str, Any]]:
    """Return the calls in a text that comes in deltas of so many characters."""
    chain = ParseChain(
        Parsers(tools=PLUGINS.factory("tool_parser", parser)),
        TOOLS,
        ChoiceContext(prompt=prompt, tools=tuple(TOOLS)),
    )
    events = [event for start in range(0, len(text), size) for event in chain.feed(text[start : start + size])]
    events += chain.finish()
    names = {event.index: event.name for event in events if isinstance(event, CallStart)}
    arguments = dict.fromkeys(names, "")
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.fragment
    return [(name, json.loads(arguments[index])) for index, name in names.items()]


def knows_several(name: str) -> bool:
    try:
        shown(name, USER, calling(call("now", {}), call("now", {}, 1)))
    except RequestError as error:
        if "one call at most" in error.message:
            return False
        raise
    return True


# ------------------------------------------------------------------------------------------------ headers and names


def test_headers_say_what_lists_show() -> None:
    for name, template in TEMPLATES.items():
        header = read_header(template.text)
        assert {"about", "models"} <= header.keys() <= {"about", "models", "parser", "also", "format"}, name
        assert template.models
        assert 0 < len(template.about) <= 120, name
        assert bool(template.parser) == template.format.startswith("https://"), name


def test_every_name_means_one_template() -> None:
    names = [word for template in TEMPLATES.values() for word in (template.name, *template.also)]
    assert len(names) == len(set(names))
    assert {find_builtin(word).name for word in names} == set(TEMPLATES)  # type: ignore[union-attr]


def test_the_documented_templates_are_there() -> None:
    documented = """hermes mistral mistral_parallel llama3.1_json llama3.2_json llama3.2_pythonic llama4_json
        llama4_pythonic granite granite_20b_fc internlm2_tool jamba deepseekv3 deepseekv31 deepseekr1 phi4_mini toolace
        xlam_llama xlam_qwen qwen3coder hunyuan_a13b gemma3_pythonic"""
    for name in documented.split():
        for option in (name, f"tool_chat_template_{name}.jinja", f"examples/tool_chat_template_{name}.jinja"):
            template = find_builtin(option)
            assert template is not None, option
            assert template.parser, option
            assert choose_templates(option, None) == {"default": template.text}
    assert find_builtin("/somewhere/template_chatml.jinja") == TEMPLATES["chatml"]


def test_the_page_lists_them_all() -> None:
    page = (ROOT / "docs" / "chat-templates.md").read_text("utf-8")
    table = page.partition("| template | tool parser |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in table]
    assert rows == [[t.name, t.parser or "–", t.models, ", ".join(t.also)] for t in TEMPLATES.values()]


@pytest.mark.parametrize(
    "option", ["hermes.jinja", "./hermes", "mine/hermes.jinja", "tool_chat_template_hermes", "Hermes"]
)
def test_other_names_of_files_name_no_template(option: str) -> None:
    assert find_builtin(option) is None
    with pytest.raises(ConfigError, match="neither a file nor a known template"):
        choose_templates(option, None)


def test_a_file_comes_before_a_template_of_its_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool_chat_template_hermes.jinja").write_text("mine {{ messages }}")
    assert choose_templates("tool_chat_template_hermes.jinja", None) == {"default": "mine {{ messages }}"}


# ------------------------------------------------------------------------------------------------ what they show


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_conversation_with_tools_is_shown_whole_and_in_order(name: str) -> None:
    calls = [call("search_places", {"city": "CALLED1"}), call("now", {"zone": "CALLED2"}, 1)][: 1 + knows_several(name)]
    results = [result("RESULT1"), result("RESULT2", 1)][: len(calls)]
    talk = [SYSTEM, USER, calling(*calls), *results, {"role": "assistant", "content": "ANSWER"}]
    talk.append({"role": "user", "content": [{"type": "text", "text": "USER2"}, {"type": "text", "text": "USER3"}]})
    text = shown(name, *talk)
    words = ["USER1", *(f"CALLED{n + 1}" for n in range(len(calls))), *(f"RESULT{n + 1}" for n in range(len(calls)))]
    words += ["ANSWER", "USER2", "USER3"]
    assert [text.count(word) for word in words] == [1] * len(words)
    assert sorted(words, key=text.index) == words
    for part in ("SYS-TEXT", "search_places", "Search places. Second sentence", "Where — “city”", "now"):
        assert part in text, part
    assert text.startswith(shown(name, *talk, begin=False))
    without = shown(name, SYSTEM, USER, tools=None)
    assert without.index("SYS-TEXT") < without.index("USER1")
    for trace in ("search_places", "function", "Undefined", "None"):
        assert trace not in without
    assert "SYS-TEXT" not in shown(name, USER)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_results_of_tools_may_be_the_end(name: str) -> None:
    text = shown(name, USER, calling(call("now", {})), result('RESULT\n“é” "q"'))
    assert text.index("USER1") < text.rindex("now") < text.index("RESULT") < text.rindex("é")


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_content_beside_calls_is_kept(name: str) -> None:
    text = shown(name, USER, calling(call("now", {}), content="BESIDE"), begin=False)
    assert text.count("BESIDE") == 1
    assert text.index("BESIDE") < text.rindex("now")


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_templates_take_content_as_text(name: str) -> None:
    assert work({"inspect": TEMPLATES[name].text, "special_tokens": TOKENS})["content"] == "string"


# ------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_come_back(name: str) -> None:
    """Take messages with calls through the template, and the model's text through the parser, to the same calls."""
    expected: list[tuple[str, Any]] = [("search_places", NESTED), ("now", {}), ("search_places", {"city": ""})]
    expected = expected if knows_several(name) else expected[:1]
    calls = [call(function, arguments, number) for number, (function, arguments) in enumerate(expected)]
    for history in ([USER], [SYSTEM, USER], [USER, calling(call("now", {})), result("12:00")]):
        text, prompt = of_model(name, *history, calling(*calls)), shown(name, *history)
        for size in (len(text), 1, 7):
            assert read(TEMPLATES[name].parser, text, size, prompt) == expected


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_an_answer_without_calls_comes_back_without_calls(name: str) -> None:
    text = of_model(name, USER, {"role": "assistant", "content": "It is sunny."})
    assert text.strip() == "It is sunny."
    assert read(TEMPLATES[name].parser, text, 1, shown(name, USER)) == []


def test_a_parser_knows_its_templates() -> None:
    assert fitting("hermes") == ["hermes"]
    assert fitting("mistral") == ["mistral", "mistral_parallel"]
    assert fitting("qwen3_coder") == fitting("qwen3_xml") == ["qwen3_coder"]
    assert fitting("unheard_of") == fitting("") == []


# ------------------------------------------------------------------------------------------------ published examples


def test_mistral_s_published_example() -> None:
    """Render the example of https://docs.mistral.ai, tokenizer v3."""
    tools = [{"type": "function", "function": {"name": "get_temperature", "parameters": {"type": "object"}}}]
    asked = call("get_temperature", {"location": "Paris, France"})
    asked["id"] = "9Ae3bDc2F"
    answer = {"role": "tool", "tool_call_id": "9Ae3bDc2F", "content": "22.0"}
    said = {"role": "assistant", "content": "22 degrees."}
    assert shown("mistral", SYSTEM, USER, calling(asked), answer, said, tools=tools) == (
        '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "get_temperature", "parameters": '
        '{"type": "object"}}}][/AVAILABLE_TOOLS][INST] SYS-TEXT\n\nUSER1[/INST][TOOL_CALLS] [{"name": '
        '"get_temperature", '
        '"arguments": {"location": "Paris, France"}, "id": "9Ae3bDc2F"}]</s>[TOOL_RESULTS] {"content": "22.0", '
        '"call_id": "9Ae3bDc2F"}[/TOOL_RESULTS] 22 degrees.</s>'
    )


def test_mistral_s_ids_have_nine_characters() -> None:
    text = shown("mistral", USER, calling(call("now", {}, 7)), result("12:00", 7))
    assert text.count('id": "d4e5f6007"') == 2
    short = calling({**call("now", {}), "id": "7"})
    text = shown("mistral_parallel", USER, short, {"role": "tool", "tool_call_id": "7", "content": "12:00"})
    assert text.count('id": "000000007"') == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "é"}, "id": "d4e5f6000"}]'),
        ("llama3.1_json", '{"name": "f", "parameters": {"x": "é"}}'),
        ("llama3.2_pythonic", '[f(x="é")]'),
        ("gemma3_pythonic", '[f(x="é")]'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"x": "é"}}]'),
        ("granite_20b_fc", '<function_call> {"name": "f", "arguments": {"x": "é"}}'),
        ("internlm2", '<|action_start|><|plugin|>\n{"name": "f", "parameters": {"x": "é"}}<|action_end|>'),
        ("jamba", ' <tool_calls>[\n  {"name": "f", "arguments": {"x": "é"}}\n]</tool_calls>'),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
            '```json\n{"x": "é"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            "deepseek_v31",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": "é"}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("phi4_mini", 'functools[{"name": "f", "arguments": {"x": "é"}}]'),
        ("xlam_qwen", '[{"name": "f", "arguments": {"x": "é"}}]'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\né\n</parameter>\n</function>\n</tool_call>"),
        ("hunyuan_a13b", '<tool_calls>[{"name": "f", "arguments": {"x": "é"}}]</tool_calls>'),
    ],
)
def test_a_call_has_the_published_form(name: str, text: str) -> None:
    assert of_model(name, USER, calling(call("f", {"x": "é"}))) == text


def test_thoughts_are_switched_as_the_model_cards_say() -> None:
    assert shown("deepseek_v31", USER).endswith("<｜Assistant｜></think>")
    assert shown("deepseek_v31", USER, thinking=True).endswith("<｜Assistant｜><think>")
    assert shown("hunyuan_a13b", USER).endswith("USER1<|extra_0|>")
    assert shown("hunyuan_a13b", USER, enable_thinking=False).endswith("<|extra_0|><think>\n\n</think>\n")
    thought = {"role": "assistant", "content": "<think>HM</think>ANSWER"}
    assert "HM" not in shown("deepseek_r1", USER, thought, USER)
