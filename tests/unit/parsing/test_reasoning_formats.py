"""Reasoning parsers of models: how prompts decide what an output begins with, and 1 MiB of anything in linear work."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest

from ferrule.interfaces.parsers import ChoiceContext, Content, Reasoning, ReasoningParser, TextDelta
from ferrule_parsing.harmony import Body, HarmonyReader, Head, Tail
from ferrule_testkit.kits.count import work
from tests.shared import grid

PARSERS = {entry.name: entry for entry in entry_points(group="ferrule.v1.reasoning_parser") if "." not in entry.name}
NAMES = sorted(PARSERS)
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'


def opened(name: str, **context: Any) -> ReasoningParser:
    parser: ReasoningParser = PARSERS[name].load()()
    parser.begin(ChoiceContext(**context))
    return parser


def read(name: str, text: str, step: int = 1 << 20, **context: Any) -> tuple[str, str]:
    """Return reasoning and content."""
    parser = opened(name, **context)
    events = [event for at in range(0, len(text), step) for event in parser.feed(TextDelta(text[at : at + step]))]
    events += parser.finish()
    thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
    return thoughts, "".join(event.text for event in events if isinstance(event, Content))


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    ("name", "context", "text", "expected"),
    [
        ("deepseek_v3", {}, "a</think>b", ("", "a</think>b")),
        ("deepseek_v3", {"template_kwargs": {"enable_thinking": True}}, "a</think>b", ("a", "b")),
        ("deepseek_v3", {"template_kwargs": {"thinking": False}}, "\na", ("", "\na")),
        ("deepseek_v3", {"prompt": "x<think>"}, "a</think>b", ("a", "b")),
        ("minimax_m2_append_think", {"prompt": "x<think>\n"}, "a</think>b", ("", "<think>\na</think>b")),
        ("minimax_m2_append_think", {"prompt": "x"}, "a</think>b", ("", "a</think>b")),
        ("hunyuan_a13b", {"prompt": "<think>\n\n</think>\n"}, "<answer>\na\n</answer>", ("", "a")),
        ("hunyuan_a13b", {"prompt": "</think>\n<answer>\n"}, "a\n\nb\n</answer>", ("", "a\n\nb")),
        ("hunyuan_a13b", {}, "<think>a</think><answer>b</answer>\nc", ("a", "b\nc")),
        ("hunyuan_a13b", {}, "<answer>b</answer>", ("", "b")),
        ("hunyuan_a13b", {}, "\n<answer>\nb\n</answer>\n", ("", "b")),
        ("hunyuan_a13b", {}, "<answ", ("", "<answ")),
        ("hunyuan_a13b", {}, "The <answer>b</answer>", ("", "The <answer>b</answer>")),
        ("ernie45", {"prompt": "<think>\n"}, "a\n</think>\n\n<response>\nb\n", ("a", "b\n")),
        ("kimi_k2", {}, "<think>a\n<|tool_calls_section_begin|>", ("a", "<|tool_calls_section_begin|>")),
        ("granite", {"continued": "Here is my thought process: so"}, " on. Here is my response:\nb", (" on. ", "b")),
        ("gemma4", {"prompt": "<|turn>model\n<|channel>thought\n<channel|>"}, "a<channel|>", ("", "a<channel|>")),
        ("mistral", {"prompt": "… [THINK]"}, "a[/THINK]b", ("a", "b")),
        ("deepseek_r1", {"templated": False}, "a</think>b", ("", "a</think>b")),
        ("deepseek_r1", {"templated": False, "prompt": "<think>\n"}, "a</think>b", ("a", "b")),
        ("none", {"prompt": "<think>"}, "a</think>b", ("", "a</think>b")),
        ("openai_gptoss", {"prompt": "<|start|>assistant<|channel|>analysis<|message|>"}, "a<|end|>b", ("a", "b")),
        ("openai_gptoss", {"prompt": "<|start|>assistant<|channel|>final<|message|>"}, "a", ("", "a")),
        ("openai_gptoss", {"continued": "It", "prompt": "… It"}, " is", ("", " is")),
        ("openai_gptoss", {}, CALL, ("", '{"a": 1}')),
        ("openai_gptoss", {"tools": (TOOL,)}, CALL, ("", CALL)),
        ("openai_gptoss", {"tools": (TOOL,), "tool_choice": "none"}, CALL, ("", '{"a": 1}')),
        ("openai_gptoss", {}, "<|channel|>analysis<|message|>a<|end|><|start|>assist", ("a", "")),
        ("openai_gptoss", {}, "plain <|end|>text", ("", "plain text")),
        ("openai_gptoss", {}, "analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", ("a", "b")),
        ("openai_gptoss", {}, "<|channel|>commentary<|end|>b<|end|><|return|>", ("", "b")),
        ("openai_gptoss", {}, "<|channel|>analysis<|message|>a<|channel|>final<|message|>b", ("a", "b")),
        ("openai_gptoss", {}, "final answer: <|x|>", ("", "final answer: <|x|>")),
        ("minimax_m2", {"prompt": "<think>\n"}, "a</think>\n\n</think>\n\nb", ("a", "b")),
        ("minimax_m2", {"prompt": "<think>\n"}, "a</think>b</think>c", ("a", "bc")),
    ],
)
def test_the_prompt_says_what_the_output_begins_with(
    name: str, context: dict[str, Any], text: str, expected: tuple[str, str], step: int
) -> None:
    assert read(name, text, step, **context) == expected


def test_special_tokens_are_those_of_the_markup() -> None:
    assert opened("mistral").special_tokens == ("[THINK]", "[/THINK]")
    assert set(opened("hunyuan_a13b").special_tokens) == {"<think>", "</think>", "<answer>", "</answer>"}
    assert "<|channel|>" in opened("openai_gptoss").special_tokens


@pytest.mark.advisory("CVE-2025-48887")
@grid({"name": NAMES, "unit": ("<", "\n", "Here is ", "<|channel|>", "</think><answer>\n", "<|start|><|end|>", "to=")})
def test_work_grows_with_the_text_and_no_faster(name: str, unit: str) -> None:
    def cost(size: int, step: int) -> int:
        return work(lambda: read(name, unit * (size // len(unit)), step))

    for step in (1, 64, 1 << 20):
        assert cost(4096, step) < 2.3 * cost(2048, step) + 200
    thoughts, content = read(name, unit * ((1 << 17) // len(unit)))
    assert len(thoughts) + len(content) <= 1 << 17


def test_messages_of_harmony() -> None:
    reader = HarmonyReader()
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.g<|channel|>comment<|message|>{}"
    assert [*reader.feed(text), *reader.finish()] == [
        Head("<|channel|>analysis<|message|>", "analysis"),
        Body("Hm."),
        Tail("<|end|>"),
        Head("<|start|>assistant to=functions.g<|channel|>comment<|message|>", "comment", "functions.g"),
        Body("{}"),
        Tail(""),
    ]
    first = HarmonyReader()
    assert first.feed(" to=functions.f<|channel|>commentary<|message|>")[0].recipient == "functions.f"  # type: ignore[union-attr]
