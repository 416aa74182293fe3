"""`none`: all text is content, as it is without a reasoning parser."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.interfaces.parsers import Content, Reasoning, ReasoningParser, TextDelta


class NoReasoning(ReasoningParser):
    """A parser that passes text through unchanged."""

    conformance = "ferrule_testkit.samples.reasoning_parser:NONE"

    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        return [Content(delta.text)] if delta.text else []

    def finish(self) -> Sequence[Reasoning | Content]:
        return []
