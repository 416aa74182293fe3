"""Outputs of models in each parser's format, for `ferrule plugins check` and tests. Not for servers."""

from __future__ import annotations

from ferrule_testkit.kits import Thought

_WHOLE = (
    Thought("<think>\nHm, <b> is it?\n</think>\n\nHello\n", "Hm, <b> is it?", "Hello\n"),
    Thought("\n<think>one\n\ntwo</think>No </think> here", "one\n\ntwo", "No </think> here"),
)

QWEN3 = {"samples": (*_WHOLE, Thought("<think>\n\n</think>\n\nHello", "", "Hello"))}
DEEPSEEK_R1 = {"samples": (*_WHOLE, Thought("Well,\n so\n</think>\n\nHello", "Well,\n so", "Hello"))}
