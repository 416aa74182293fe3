"""Thoughts as ``[[thoughts]]…[[/thoughts]]``, and the answer behind them."""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class ExampleReasoningParser(ThinkingParser):
    """A parser whose work `ThinkingParser` does. `begins_inside = True` is for models whose prompt opens the block."""

    open_tag = "[[thoughts]]"
    close_tag = "[[/thoughts]]"

    conformance = "ferrule_example.conformance:SETTINGS"
