"""Conformance kits: one class per kind of plugin. Each test method is one promise.

    from ferrule_testkit.kits import PolicyKit

    class TestMine(PolicyKit):
        plugin = Mine

`ferrule plugins check NAME` runs the same kit without a test file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ferrule_testkit.kits.base import Broken, Kit, promise

if TYPE_CHECKING:
    from ferrule_testkit.kits.reasoning_parser import ReasoningParserKit, Thought
    from ferrule_testkit.kits.tool_parser import CallText, ToolParserKit

# Loaded when they are asked for: a kit imports what its kind needs, and some kinds need torch.
_HOMES = {
    "CallText": "tool_parser",
    "ReasoningParserKit": "reasoning_parser",
    "Thought": "reasoning_parser",
    "ToolParserKit": "tool_parser",
}

__all__ = ["Broken", "CallText", "Kit", "ReasoningParserKit", "Thought", "ToolParserKit", "promise"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
