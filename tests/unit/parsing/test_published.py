"""Outputs as they are published for each tool parser: by who made the model, or by engines that serve it.

Sources: chat templates and cards of the models that the parsers' docstrings name; tests/tool_parsers of
vllm-project/vllm; tests/test-chat.cpp of ggml-org/llama.cpp; srt/function_call of sgl-project/sglang. Names and values
are others.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ferrule.interfaces.parsers import ChoiceContext
from ferrule.plugin import discover
from ferrule_testkit.kits.parsers import Fold, fold
from tests.unit.parsing.published_newer import NEWER

Calls = list[tuple[str, Any]]

PLUGINS = discover()


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = (
    tool("forecast", city="string", unit="string", days="integer"),
    tool("clock", zone="string"),
    tool("ping"),
    tool(
        "save", text="string", size="integer", ratio="number", force="boolean", note="null", tags="array", meta="object"
    ),
)
OSLO: dict[str, Any] = {"city": "Oslo"}
UTC: dict[str, Any] = {"zone": "UTC"}
ONE = '{"name": "forecast", "arguments": {"city": "Oslo"}}'
TWO = '{"name": "clock", "arguments": {"zone": "UTC"}}'
BOTH: Calls = [("forecast", OSLO), ("clock", UTC)]
ALONE: Calls = [("forecast", OSLO)]
AND_PING: Calls = [("forecast", OSLO), ("ping", {})]


def read(name: str, text: str, step: int) -> Fold:
    parser = PLUGINS.load("tool_parser", name)(list(TOOLS))
    parser.begin(ChoiceContext(tools=TOOLS))
    return fold(parser, [text[at : at + step] for at in range(0, len(text), step)])


JSON_OBJECTS: list[tuple[str, str, str, Calls]] = [
    # chat_format.md of InternLM: a line break behind the marks is optional
    (
        "internlm",
        'So.<|action_start|><|plugin|>{"name": "forecast", "parameters": {"city": "Oslo"}}<|action_end|>',
        "So.",
        ALONE,
    ),
    (
        "internlm",
        '<|action_start|><|plugin|>\n{\n "name": "ping",\n "parameters": {}\n}<|action_end|>',
        "",
        [("ping", {})],
    ),
    # vLLM: Granite 3 writes white space in the list, and arguments in front of the name
    ("granite", f"<|tool_call|> [\n  {ONE},\n  {TWO}\n]", "", BOTH),
    ("granite", f"See.\n<tool_call> [{ONE}]\nDone.", "See.\nDone.", ALONE),
    ("granite", '<|tool_call|> [{"arguments": {"city": "Oslo"}, "name": "forecast"}]', "", ALONE),
    ("granite", f"[{ONE}]", f"[{ONE}]", []),
    ("granite-20b-fc", f"So.\n<function_call> {ONE}\n<function_call>{TWO}", "So.", BOTH),
    ("hermes", f"So.<tool_call>\n{ONE}</tool_call>", "So.", ALONE),
    # vLLM: Granite 4 may write the arguments as a string of JSON
    ("granite4", '<tool_call> {"name": "forecast", "arguments": "{\\"city\\": \\"Oslo\\"}"} </tool_call>', "", ALONE),
    ("granite4", f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>", "", BOTH),
    # card of ERNIE-4.5-21B-A3B-Thinking
    ("ernie45", f"\n\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>\n", "", BOTH),
    # chat template of Jamba 1.5
    ("jamba", f" Sure.<tool_calls>[\n    {ONE},\n    {TWO}\n]</tool_calls>", " Sure.", BOTH),
    # vLLM, Hunyuan A13B: text on both sides
    ("hunyuan_a13b", f"I call. <tool_calls>[{ONE}, {TWO}]</tool_calls>\nThanks", "I call.\nThanks", BOTH),
    ("hunyuan_a13b", f"<tool_calls>\n[{ONE}]\n</tool_calls>", "", ALONE),
    # the template for Phi-4-mini that its makers gave to vLLM
    ("phi4_mini_json", f"So:\nfunctools[\n  {ONE},\n  {TWO}\n]", "So:", BOTH),
    # its tokens for tools, which it writes with its own template
    ("phi4_mini_json", f"<|tool_call|>[{ONE}, {TWO}]<|/tool_call|>", "", BOTH),
    # vLLM, xLAM 2: alone, in a fence, behind the marks of the models it was trained from
    ("xlam", f"[{ONE}, {TWO}]", "", BOTH),
    ("xlam", f"I look.\n```json\n[{ONE}]\n```", "I look.", ALONE),
    ("xlam", f"I look.[TOOL_CALLS][{ONE}]", "I look.", ALONE),
    ("xlam", f"I look.<tool_call>[{ONE}]</tool_call>", "I look.", ALONE),
    # chat template of Command A, and vLLM
    (
        "cohere_command3",
        '<|START_ACTION|>\n[\n    {"tool_call_id": "0", "tool_name": "forecast", "parameters": {"city": "Oslo"}},\n'
        '    {"tool_call_id": "1", "tool_name": "ping", "parameters": {}}\n]\n<|END_ACTION|>',
        "",
        AND_PING,
    ),
    ("cohere_command3", "\n<|START_RESPONSE|>It is <b>.<|END_RESPONSE|>", "\nIt is <b>.", []),
    # Meta's llama3_1 page and vLLM: separators, the other key, escapes, text behind
    (
        "llama3_json",
        '{"name": "forecast", "parameters": {"city": "Oslo"}} ; {"name": "ping", "parameters": {}}',
        "",
        AND_PING,
    ),
    (
        "llama3_json",
        '{"name": "forecast", "arguments": {"city": "Oslo"}}\n{"name": "ping", "parameters": {}}',
        "",
        AND_PING,
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "ping", "parameters": {"a": "\\u00d8 {b}"}}',
        "",
        [("ping", {"a": "Ø {b}"})],
    ),
    (
        "llama3_json",
        '{"type": "function", "name": "ping", "parameters": {}} I used {it}',
        "I used {it}",
        [("ping", {})],
    ),
    ("llama3_json", '{"parameters": {}}', '{"parameters": {}}', []),
    ("llama4_json", '<|python_start|>{"name": "ping", "parameters": {}}<|python_end|>', "", [("ping", {})]),
]

NAMED_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
FIRST = '<|tool_call_begin|>functions.forecast:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
SPACED = "<|tool_call_begin|>functions.ping:1 <|tool_call_argument_begin|> {\n} <|tool_call_end|>"
FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"

NAMED: list[tuple[str, str, str, Calls]] = [
    # tool_call_guidance.md of Kimi K2; its technical report has the section's tag in the singular
    ("kimi_k2", "I look. " + NAMED_SECTION.format(FIRST + SPACED), "I look.", AND_PING),
    ("kimi_k2", f"<|tool_call_section_begin|>\n{FIRST}\n<|tool_call_section_end|>", "", ALONE),
    # llama.cpp, Kimi K2 Thinking: neither a section nor what ends a call; vLLM: a name without its prefix
    ("kimi_k2", FIRST.removesuffix("<|tool_call_end|>") + SPACED, "", AND_PING),
    ("kimi_k2", NAMED_SECTION.format(FIRST.replace("functions.", "")), "", ALONE),
    # mistral-common, tokenizers before v11, v11 and later
    ("mistral", f"Hi[TOOL_CALLS] [{ONE}, {TWO}]", "Hi", BOTH),
    (
        "mistral",
        '[TOOL_CALLS] [{"arguments": {"name": "x"}, "name": "ping", "id": "123456789"}]',
        "",
        [("ping", {"name": "x"})],
    ),
    ("mistral", '[TOOL_CALLS]forecast{"city": "Oslo"}[TOOL_CALLS]ping{}', "", AND_PING),
    ("mistral", '[TOOL_CALLS]forecast[ARGS]{"city": "Oslo"}[TOOL_CALLS]ping[ARGS]{}', "", AND_PING),
    # chat template of Mistral Small 3.2
    ("mistral", '[TOOL_CALLS]forecast[CALL_ID]a1B2c3D4e[ARGS]{"city": "Oslo"}', "", ALONE),
    # chat templates of DeepSeek V3 and V3.1; llama.cpp: what distilled R1 models write
    (
        "deepseek_v3",
        "So.<｜tool▁calls▁begin｜>"
        + FENCED.format("forecast", '{"city": "Oslo"}')
        + FENCED.format("ping", "{}")
        + "<｜tool▁calls▁end｜>",
        "So.",
        AND_PING,
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n```json\n{"city": "Oslo"}\n```\n'
        "<｜tool▁call▁end｜>\n<｜tool▁calls▁end｜>",
        "",
        ALONE,
    ),
    *(
        (
            "deepseek_v3",
            f'{tag}function<｜tool▁sep｜>forecast\n```json\n{{"city": "Oslo"}}```<｜tool▁call▁end｜>',
            "",
            ALONE,
        )
        for tag in (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls｜>",
            "<｜tool calls begin｜>",
            "<｜tool_calls_begin｜>",
            "<｜tool\\_calls\\_begin｜>",
        )
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        AND_PING,
    ),
    # OpenAI's Harmony guide, and llama.cpp: the recipient may stand behind the role, on any channel
    (
        "openai",
        '<|channel|>commentary to=functions.forecast <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        "",
        ALONE,
    ),
    ("openai", ' to=functions.forecast<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>', "", ALONE),
    ("openai", '<|start|>assistant to=functions.forecast<|channel|>analysis<|message|>{"city": "Oslo"}', "", ALONE),
    (
        "openai",
        "<|channel|>commentary<|message|>A plan.<|end|><|start|>assistant<|channel|>commentary to=functions.ping "
        "<|constrain|>json<|message|><|call|>",
        "A plan.",
        [("ping", {})],
    ),
]

DSML = "<｜DSML｜"
DSML_ARGUMENT = DSML + 'parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
STEP_ARGUMENT = '<steptml:parameter name="{}">{}</steptml:parameter>'
STEP = '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">{}</steptml:invoke><｜tool_call_end｜>'
CODE = 'def f(a = "1"):\n    return a\n'

PARAMETERS: list[tuple[str, str, str, Calls]] = [
    # chat template of Qwen3-Coder; llama.cpp: without the first outer tag, values that end with a line break
    (
        "qwen3_coder",
        "Sure.<tool_call>\n<function=save>\n<parameter=text>\n12\n</parameter>\n<parameter=meta>\n"
        '{"w": 10,\n "h": [2]}\n</parameter>\n<parameter=size>\n-14\n</parameter>\n'
        "<parameter=force>\nTrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
        "Sure.",
        [("save", {"text": "12", "meta": {"w": 10, "h": [2]}, "size": -14, "force": True, "note": None}), ("ping", {})],
    ),
    (
        "qwen3_coder",
        f"<function=save>\n<parameter=text>\n{CODE}\n</parameter>\n</function>\n</tool_call>",
        "",
        [("save", {"text": CODE})],
    ),
    (
        "qwen3_xml",
        "<tool_call>\n<function=save>\n<parameter=text>\n\n</parameter>\n</function>\n</tool_call>",
        "",
        [("save", {"text": ""})],
    ),
    (
        "qwen3_coder",
        '<tool_call>\n<function=save>\n<parameter=text>\n"a"\n</parameter>\n</function>\n</tool_call>',
        "",
        [("save", {"text": '"a"'})],
    ),
    # the parser in the repository of Qwen3-Coder: a value whose end is missing
    (
        "qwen3_coder",
        "<tool_call>\n<function=forecast>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</function>\n</tool_call>",
        "",
        [("forecast", {"city": "Oslo", "days": 3})],
    ),
    # chat template of Seed-OSS, and llama.cpp: values stand as they are
    (
        "seed_oss",
        f"<seed:tool_call>\n<function=save>\n<parameter=text>{CODE}</parameter>\n<parameter=tags>"
        '[{"a": "b", "c": false}]</parameter>\n</function>\n</seed:tool_call>\n'
        "<seed:tool_call>\n<function=ping>\n</function>\n</seed:tool_call>",
        "",
        [("save", {"text": CODE, "tags": [{"a": "b", "c": False}]}), ("ping", {})],
    ),
    # chat templates of GLM 4.5 and 4.7; vLLM: each also in the other's layout
    (
        "glm45",
        "I look. <tool_call>forecast\n    <arg_key>city</arg_key>\n    <arg_value>Oslo</arg_value>\n    </tool_call>\n"
        "<tool_call>ping\n</tool_call>",
        "I look.",
        AND_PING,
    ),
    ("glm45", "<tool_call>forecast<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>", "", ALONE),
    (
        "glm45",
        "<tool_call>save\n<arg_key>text</arg_key>\n<arg_value>2025-08-01</arg_value>\n<arg_key>tags</arg_key>\n"
        '<arg_value>["a", 1]</arg_value>\n<arg_key>ratio</arg_key>\n<arg_value>3</arg_value>\n</tool_call>',
        "",
        [("save", {"text": "2025-08-01", "tags": ["a", 1], "ratio": 3})],
    ),
    (
        "glm47",
        "So.<tool_call>forecast<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call><tool_call>ping</tool_call>",
        "So.",
        AND_PING,
    ),
    ("glm47", "<tool_call>forecast\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>", "", ALONE),
    # MiniMax's tool calling guide
    (
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="save">\n<parameter name="tags">["a", "\\"b\\" c"]</parameter>\n'
        '<parameter name="size">5</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n</minimax:tool_call>',
        "I look.",
        [("save", {"tags": ["a", '"b" c'], "size": 5}), ("ping", {})],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="forecast"><parameter name="city">Oslo</parameter></invoke>'
        "</minimax:tool_call>",
        "",
        ALONE,
    ),
    # encoding script of DeepSeek V3.2, llama.cpp and vLLM: the model says what is a string
    (
        "deepseek_v32",
        f'Sure.\n\n{DSML}function_calls>\n{DSML}invoke name="save">\n'
        + "".join(
            map(DSML_ARGUMENT.format, ("text", "size", "meta"), ("true", "false", "false"), ("42", "-14", '{"a":[1]}'))
        )
        + f'</｜DSML｜invoke>\n{DSML}invoke name="ping">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Sure.",
        [("save", {"text": "42", "size": -14, "meta": {"a": [1]}}), ("ping", {})],
    ),
    # SGLang and vLLM, Step 3: the schema gives types, and strings keep their white space
    (
        "step3",
        "I help.\n<｜tool_calls_begin｜>\n"
        + STEP.format("forecast", '\n<steptml:parameter name="city">Oslo</steptml:parameter>\n')
        + "\n"
        + STEP.format("ping", "")
        + "\n<｜tool_calls_end｜>\nHere",
        "I help.\nHere",
        AND_PING,
    ),
    (
        "step3",
        "<｜tool_calls_begin｜>"
        + STEP.format(
            "save",
            "".join(
                map(
                    STEP_ARGUMENT.format,
                    ("text", "size", "force", "note", "meta"),
                    ("  if a < b:\n", " 4 ", "True", "null", "{'a': None}"),
                )
            ),
        )
        + "<｜tool_calls_end｜>",
        "",
        [("save", {"text": "  if a < b:\n", "size": 4, "force": True, "note": None, "meta": {"a": None}})],
    ),
]

PYTHON = (
    "save(text='Anna\\'s \\\"x\\\"', size=37, ratio=-2.5, meta={'a': 'b'}, note=None, force=True, tags=['c', \"d\"])"
)
SAVED: dict[str, Any] = {
    "text": 'Anna\'s "x"',
    "size": 37,
    "ratio": -2.5,
    "meta": {"a": "b"},
    "note": None,
    "force": True,
    "tags": ["c", "d"],
}

LITERALS: list[tuple[str, str, str, Calls]] = [
    # Meta's llama3_2 and llama4 pages, and vLLM: escapes, nested values, no arguments, no space behind a comma
    ("pythonic", f"[{PYTHON}, ping()]", "", [("save", SAVED), ("ping", {})]),
    ("llama4_pythonic", f"<|python_start|>[{PYTHON},ping()]<|python_end|>", "", [("save", SAVED), ("ping", {})]),
    ("llama4_pythonic", "<|python_start|>[save(meta={}, tags=[])]", "", [("save", {"meta": {}, "tags": []})]),
    # chat template of OLMo 3: a call on each line; vLLM: JSON's words too
    ("olmo3", f"<function_calls>{PYTHON}\nping()</function_calls>", "", [("save", SAVED), ("ping", {})]),
    (
        "olmo3",
        "<function_calls>\nsave(force=true, note=null)\n</function_calls>",
        "",
        [("save", {"force": True, "note": None})],
    ),
    # card of LFM2, llama.cpp and vLLM: text around, dotted names, line breaks in strings, numbers with zeros in front
    ("lfm2", f"I look.<|tool_call_start|>[{PYTHON}]<|tool_call_end|>\nSoon.", "I look.\nSoon.", [("save", SAVED)]),
    (
        "lfm2",
        "<|tool_call_start|> [a.b(x=[{'y': 2}], z=07)]<|tool_call_end|>",
        "",
        [("a.b", {"x": [{"y": 2}], "z": 7})],
    ),
    ("lfm2", "<|tool_call_start|>[save(text='a\n\\tb]')]<|tool_call_end|>", "", [("save", {"text": "a\n\tb]"})]),
    ("lfm2", f"<|tool_call_start|>[{ONE}]<|tool_call_end|>", "", ALONE),
    ("lfm2", "As [text](url).", "As [text](url).", []),
    # Google's page on FunctionGemma
    (
        "functiongemma",
        "<start_function_call>call:forecast{city:<escape>Oslo<escape>}<end_function_call>"
        "<start_function_call>call:save{tags:[<escape>a, b<escape>,1],meta:{k:<escape>v<escape>},force:true}"
        "<end_function_call>",
        "",
        [("forecast", OSLO), ("save", {"tags": ["a, b", 1], "meta": {"k": "v"}, "force": True})],
    ),
    # chat template of Gemma 4, llama.cpp and vLLM: keys in nested objects with and without marks, names with signs
    (
        "gemma4",
        'I look.<|tool_call>call:forecast{city:<|"|>Oslo<|"|>}<tool_call|><|tool_call>call:ping{}<tool_call|>',
        "I look.",
        AND_PING,
    ),
    (
        "gemma4",
        '<|tool_call>call:save{meta:{<|"|>3<|"|>:<|"|>t<|"|>,k:{i:[<|"|>a]}<|"|>]}},note:null,ratio:1.5e10,size:-7,tags:[]}<tool_call|>',
        "",
        [("save", {"meta": {"3": "t", "k": {"i": ["a]}"]}}, "note": None, "ratio": 1.5e10, "size": -7, "tags": []})],
    ),
    ("gemma4", '<|tool_call>call:get-a.b{x:<|"|>y<|"|>}<tool_call|>', "", [("get-a.b", {"x": "y"})]),
]

CASES = [*JSON_OBJECTS, *NAMED, *PARAMETERS, *LITERALS, *NEWER]


@pytest.mark.parametrize("step", [1, 1 << 20], ids=["characters", "whole"])
@pytest.mark.parametrize(
    ("name", "text", "content", "calls"), CASES, ids=[f"{case[0]}-{at}" for at, case in enumerate(CASES)]
)
def test_published_outputs(name: str, text: str, content: str, calls: Calls, step: int) -> None:
    found = read(name, text, step)
    assert found.content == content
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls


def test_every_tool_parser_has_an_output() -> None:
    own = {
        name
        for name in PLUGINS.names("tool_parser")
        if PLUGINS.load("tool_parser", name).__module__.startswith("ferrule_plugins.")
    }
    assert own == {name for name, *_ in CASES}


def test_ids_are_those_of_the_model_or_fit_its_template() -> None:
    """Keep the model's ids, or make nine letters and digits: templates of Mistral refuse others; Kimi K2 expects its
    own back.
    """
    assert read("mistral", "[TOOL_CALLS]ping[CALL_ID]a1B2c3D4e[ARGS]{}", 1).ids == ["a1B2c3D4e"]
    assert "[CALL_ID]" in PLUGINS.load("tool_parser", "mistral").special_tokens
    for text in ("[TOOL_CALLS]ping[ARGS]{}", f"[TOOL_CALLS][{ONE}]"):
        (id,) = read("mistral", text, 1).ids
        assert re.fullmatch("[a-zA-Z0-9]{9}", id)
    assert read("kimi_k2", FIRST, 1).ids == ["functions.forecast:0"]
