"""Outputs as published for reasoning parsers, from the sources of test_published and vLLM's tests/reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from ferrule.interfaces.parsers import ChoiceContext
from ferrule.plugin import discover
from ferrule_testkit.kits.parsers import fold

PLUGINS = discover()
CALL = "<|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{}<|tool_call_end|>"

REASONING: list[tuple[str, dict[str, Any], str, str, str]] = [
    # vLLM: the card's layout, without a closing tag, with calls inside the answer
    ("hunyuan_a13b", {}, "<think>\nA\nB\n</think>\n<answer>\nC\n</answer>", "A\nB", "C"),
    (
        "hunyuan_a13b",
        {},
        "<think>\n\n</think>\n<answer>\nC\n<tool_calls>[]</tool_calls>\n</answer>",
        "",
        "C\n<tool_calls>[]</tool_calls>",
    ),
    ("ernie45", {}, "a</think>b", "a", "b"),
    ("ernie45", {}, "a\n</think>\n\n<response>\nb\n</response>\n<tool_call>\n{}", "a", "b\n<tool_call>\n{}"),
    ("olmo3", {}, "<think> Look!\n\nSo... </think>No", " Look!\n\nSo... ", "No"),
    ("olmo3", {}, "</think>\n\nNo", "", "No"),
    ("step3", {}, "a", "a", ""),
    ("deepseek_v3", {"template_kwargs": {"thinking": True}}, "a</think>b", "a", "b"),
    ("deepseek_v3", {}, "a</think>b", "", "a</think>b"),
    ("mistral", {}, "\n[THINK]a[/THINK]b", "a", "b"),
    # llama.cpp, Kimi K2 Thinking: a call inside the thoughts, without a section
    ("kimi_k2", {}, f"<think>I need it.{CALL}", "I need it.", CALL),
]


@pytest.mark.parametrize("step", [1, 1 << 20], ids=["characters", "whole"])
@pytest.mark.parametrize(("name", "context", "text", "thoughts", "content"), REASONING)
def test_published_thoughts(
    name: str, context: dict[str, Any], text: str, thoughts: str, content: str, step: int
) -> None:
    parser = PLUGINS.load("reasoning_parser", name)()
    parser.begin(ChoiceContext(**context))
    found = fold(parser, [text[at : at + step] for at in range(0, len(text), step)])
    assert (found.reasoning, found.content) == (thoughts, content)
