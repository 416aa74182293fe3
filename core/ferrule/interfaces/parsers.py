"""`tool_parser` and `reasoning_parser`: from deltas of text to events.

One parser object serves one choice of one request. Whatever the cut of the text into deltas, the events fold to the
same answer; nothing is lost, and no text raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from ferrule.types import GrammarSpec


class TextDelta(Struct, frozen=True):
    """New text of one choice, and the ids that it came from (for parsers that look at special tokens)."""

    text: str
    token_ids: tuple[int, ...] = ()


class Content(Struct, frozen=True):
    text: str


class Reasoning(Struct, frozen=True):
    text: str


class CallStart(Struct, frozen=True):
    index: int
    id: str
    name: str


class CallArguments(Struct, frozen=True):
    """A fragment of the call's arguments; the fragments of one call join to a JSON text."""

    index: int
    fragment: str


class CallEnd(Struct, frozen=True):
    index: int


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


class ReasoningParser(ABC):
    @abstractmethod
    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        """Take the next delta; what cannot be decided yet is held back."""

    @abstractmethod
    def finish(self) -> Sequence[Reasoning | Content]:
        """Release what was held back."""


class ToolParser(ABC):
    """Constructed with the request's tools (the OpenAI objects) for one choice."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self.tools = tools

    @abstractmethod
    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        """The grammar that makes the model call as `tool_choice` demands, or None."""

    @abstractmethod
    def feed(self, delta: TextDelta) -> Sequence[Event]:
        """Take the next delta; what cannot be decided yet is held back."""

    @abstractmethod
    def finish(self) -> Sequence[Event]:
        """Release what was held back; close an open call."""
