"""Work on hostile text grows with its length: counted in calls of functions, of every parser, whatever the delta."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest

from ferrule.interfaces.parsers import ChoiceContext, ReasoningParser, TextDelta, ToolParser
from ferrule.plugin import discover
from ferrule_testkit.kits.tool_parser import CallText, ToolParserKit

_SHORT, _LONG = 128, 256  # characters
_GROWTH = 2.5  # of the work, from one to the other
_PLUGINS = discover()
_TOOLS: list[dict[str, Any]] = list(ToolParserKit.tools)
_REPEATED = ("{", "[", "<", '"', "\\", "(", "'", "`", "[{", '{"')


def work(parser: ToolParser | ReasoningParser, text: str, step: int) -> int:
    """Count the functions that are called and left, those written in C too."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += 1

    parser.begin(ChoiceContext(tools=tuple(_TOOLS), tool_choice="auto"))
    sys.setprofile(profile)
    try:
        for at in range(0, len(text), step):
            parser.feed(TextDelta(text[at : at + step]))
        parser.finish()
    finally:
        sys.setprofile(None)
    return count


def beginnings(kind: Any) -> list[str]:
    """Return an empty text, and calls of the samples that end in their tag, their name, their arguments."""
    module, _, constant = kind.conformance.partition(":")
    samples = getattr(import_module(module), constant)["samples"]
    call = next(part.text for sample in samples for part in sample if isinstance(part, CallText))
    return ["", *(call[: len(call) * share // 10] for share in (5, 10))]


@pytest.mark.parametrize("step", [2, 256])
@pytest.mark.parametrize("name", sorted(_PLUGINS.names("tool_parser")))
def test_tool_parsers_work_in_proportion_to_the_text(name: str, step: int) -> None:
    kind = _PLUGINS.load("tool_parser", name)
    for before in beginnings(kind):
        for part in (*_REPEATED, *filter(None, {before, before[:8]})):
            text = before + part * _LONG
            short, long = (work(kind(_TOOLS), text[: len(before) + size], step) for size in (_SHORT, _LONG))
            assert long <= _GROWTH * short + 200, (before, part, short, long)


@pytest.mark.parametrize("name", sorted(_PLUGINS.names("reasoning_parser")))
def test_reasoning_parsers_work_in_proportion_to_the_text(name: str) -> None:
    kind = _PLUGINS.load("reasoning_parser", name)
    for before in ("", "<think>", "<|channel|>"):
        for part in (*_REPEATED, "<think>", "</think", "<|", "<|channel|>analysis"):
            text = before + part * _LONG
            short, long = (work(kind(), text[: len(before) + size], 1) for size in (_SHORT, _LONG))
            assert long <= _GROWTH * short + 200, (before, part, short, long)
