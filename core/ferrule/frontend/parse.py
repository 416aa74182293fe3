"""The parse chain of one choice: text → reasoning parser → tool parser → events.

Both parsers are plugins and optional; without them text is content. Events of equal kind that follow each other are
joined, so a delta is as few events as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ferrule.interfaces.parsers import Content, Event, Reasoning, ReasoningParser, TextDelta, ToolParser


@dataclass(frozen=True)
class Parsers:
    """How to make the parsers of a choice; None: none."""

    reasoning: Callable[[], ReasoningParser] | None = None
    tools: Callable[[Sequence[dict[str, Any]]], ToolParser] | None = None


class ParseChain:
    """`tools` are the request's; without tools the tool parser does not run."""

    __slots__ = ("_reasoning", "_tools")

    def __init__(self, parsers: Parsers, tools: Sequence[dict[str, Any]] | None) -> None:
        self._reasoning = parsers.reasoning() if parsers.reasoning else None
        self._tools = parsers.tools(tools) if parsers.tools and tools else None

    def feed(self, text: str, token_ids: tuple[int, ...] = ()) -> tuple[Event, ...]:
        """Events of new text and the ids that it came from."""
        if self._reasoning is None and self._tools is None:
            return (Content(text),) if text else ()
        events: Iterable[Event] = (Content(text),)
        if self._reasoning is not None:
            events = self._reasoning.feed(TextDelta(text, token_ids))
        return _join(self._read_calls(list(events), token_ids))

    def finish(self) -> tuple[Event, ...]:
        """Events of what the parsers held back."""
        if self._reasoning is None and self._tools is None:
            return ()
        events = self._read_calls(list(self._reasoning.finish()) if self._reasoning else [], ())
        if self._tools is not None:
            events += self._tools.finish()
        return _join(events)

    def _read_calls(self, events: list[Event], token_ids: tuple[int, ...]) -> list[Event]:
        """Give content to the tool parser; the ids go with the last piece of content."""
        if self._tools is None:
            return events
        last = max((i for i, event in enumerate(events) if isinstance(event, Content)), default=-1)
        read: list[Event] = []
        for i, event in enumerate(events):
            if isinstance(event, Content):
                read += self._tools.feed(TextDelta(event.text, token_ids if i == last else ()))
            else:
                read.append(event)
        return read


def _join(events: Iterable[Event]) -> tuple[Event, ...]:
    joined: list[Event] = []
    for event in events:
        before = joined[-1] if joined else None
        if isinstance(event, Content | Reasoning):
            if not event.text:
                continue
            if isinstance(before, Content | Reasoning) and type(before) is type(event):
                joined[-1] = type(event)(before.text + event.text)
                continue
        joined.append(event)
    return tuple(joined)
