"""The parse chain of one choice: text → reasoning parser → tool parser → events.

Both parsers are plugins and optional; without them text is content. Events of equal kind that follow each other are
joined, so a delta is as few events as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from ferrule.forms import GrammarSpec
from ferrule.frontend.guided.calls import CallList, NamedCall
from ferrule.frontend.text.stops import StopMatcher
from ferrule.interfaces.parsers import (
    CallArguments,
    CallStart,
    ChoiceContext,
    Content,
    Event,
    Reasoning,
    ReasoningParser,
    TextDelta,
    ToolParser,
    join,
)
from ferrule.plugin.faults import failing_request

ToolParsers = Callable[[Sequence[dict[str, Any]]], ToolParser]


@dataclass(frozen=True)
class Parsers:
    """Factories of a choice's parsers, None for no parser, and the parsers' names in logs."""

    reasoning: Callable[[], ReasoningParser] | None = None
    tools: ToolParsers | None = None
    reasoning_title: str = "reasoning_parser"
    tools_title: str = "tool_parser"


def enforces(choice: str | dict[str, Any] | None) -> bool:
    """Tell whether a tool choice demands a call."""
    return choice == "required" or isinstance(choice, dict)


class ParseChain:
    """The parsers of one choice, ready to read. `tools` are the request's; without tools the tool parser does not run.

    `constraint` is the form of calls that `tool_choice` demands, None for no demand. `stops` are the stop strings that
    end the answer and not the thoughts. An exception of a parser is logged with the parser's title, and raised as
    RequestFailed here and in `feed` and `finish`.
    """

    __slots__ = (
        *("_parsers", "called", "constraint", "parted", "reasoning", "special_tokens"),
        *("stops", "tools", "wants_special_tokens"),
    )

    def __init__(
        self,
        parsers: Parsers,
        tools: Sequence[dict[str, Any]] | None = None,
        context: ChoiceContext | None = None,
        stops: StopMatcher | None = None,
    ) -> None:
        self._parsers = parsers
        self.stops = copy(stops)
        self.parted = (0, 0)  # characters of thoughts, and of other text, in the last text
        context = context or ChoiceContext()
        choice = context.tool_choice or "auto"
        tools = () if choice == "none" else tools or ()
        as_json = NamedCall if isinstance(choice, dict) else CallList
        make = parsers.tools or (as_json if enforces(choice) else None)
        self.reasoning, self.tools, self.constraint = self._begin(make if tools else None, tools, context)
        if tools and enforces(choice) and self.constraint is None:  # the server's format of calls cannot be enforced
            self.reasoning, self.tools, self.constraint = self._begin(as_json, tools, context)
        self.called: bool | None = None if self.tools is None else False  # whether the text held a call
        begun = [parser for parser in (self.reasoning, self.tools) if parser is not None]
        self.wants_special_tokens = any(parser.wants_special_tokens for parser in begun)
        self.special_tokens = tuple(text for parser in begun for text in parser.special_tokens)

    def _begin(
        self, make: ToolParsers | None, tools: Sequence[dict[str, Any]], context: ChoiceContext
    ) -> tuple[ReasoningParser | None, ToolParser | None, GrammarSpec | None]:
        """Make both parsers. A call may end thoughts, so each parser is told the tags of the other."""
        reasoning, parser, constraint = None, None, None
        if make is not None:
            with self._tools_fault("begin"):
                parser = make(tools)
        if self._parsers.reasoning is not None:
            with self._reasoning_fault("begin"):
                reasoning = self._parsers.reasoning()
                if make is None or parser is None or not parser.call_tags:
                    reasoning.begin(context)
                else:
                    reasoning.begin(replace(context, new_tool_parser=partial(_begun, make, tools, context)))
                    tags, dropped = reasoning.thoughts(), reasoning.dropped_tags
                    context = replace(context, dropped_tags=dropped, closing_tags=tags.closes if tags else ())
        if parser is not None:
            with self._tools_fault("begin"):
                parser.begin(context)
                constraint = parser.constraint(context.tool_choice or "auto")
        return reasoning, parser, constraint

    def feed(self, text: str, token_ids: tuple[int, ...] = (), may_stop: bool = True) -> tuple[Event, ...]:
        """Return the events of new text and its ids; with `may_stop`, stop strings in the text count."""
        if self.reasoning is None and self.tools is None:
            return (Content(text),) if text else ()
        events: Iterable[Event] = (Content(text),)
        if self.reasoning is not None:
            with self._reasoning_fault("feed"):
                events = self._part(self.reasoning.feed(TextDelta(text, token_ids)))
        if may_stop:
            events = self._stop(events)
        return join_events(self._read_calls(list(events), token_ids))

    def finish(self) -> tuple[Event, ...]:
        """Return the events of the text that the parsers held back."""
        if self.reasoning is None and self.tools is None:
            return ()
        rest: list[Event] = []
        self.parted = (0, 0)
        if self.reasoning is not None and not self.stopped:
            with self._reasoning_fault("finish"):
                rest = self._part(self.reasoning.finish())
            rest = self._stop(rest)
        if self.stops is not None and not self.stopped:
            rest.append(Content(self.stops.finish()))
        events = self._read_calls(rest, ())
        if self.tools is not None:
            with self._tools_fault("finish"):
                events += self._note(self.tools.finish())
        return join_events(events)

    @property
    def stopped(self) -> bool:
        """Whether one of the stop strings has ended the answer, so that only its end is still to come."""
        return self.stops is not None and self.stops.matched is not None

    def _stop(self, events: Iterable[Event]) -> list[Event]:
        """Return the events before a stop string in the text that is not thoughts."""
        if self.stops is None:
            return list(events)
        kept: list[Event] = []
        for event in events:
            if not self.stopped:
                kept.append(Content(self.stops.feed(event.text)) if isinstance(event, Content) else event)
        return kept

    def _reasoning_fault(self, doing: str) -> AbstractContextManager[None]:
        return failing_request(self._parsers.reasoning_title, doing)

    def _tools_fault(self, doing: str) -> AbstractContextManager[None]:
        return failing_request(self._parsers.tools_title, doing)

    def _read_calls(self, events: list[Event], token_ids: tuple[int, ...]) -> list[Event]:
        """Give content to the tool parser; the ids go with the last piece of content."""
        if self.tools is None:
            return events
        last = max((i for i, event in enumerate(events) if isinstance(event, Content)), default=-1)
        read: list[Event] = []
        for i, event in enumerate(events):
            if isinstance(event, Content):
                with self._tools_fault("feed"):
                    read += self._note(self.tools.feed(TextDelta(event.text, token_ids if i == last else ())))
            else:
                read.append(event)
        return read

    def _part(self, events: Iterable[Event]) -> list[Event]:
        found = _checked(events)
        thoughts = sum(len(event.text) for event in found if isinstance(event, Reasoning))
        self.parted = thoughts, sum(len(event.text) for event in found if isinstance(event, Content))
        return found

    def _note(self, events: Iterable[Event]) -> Iterable[Event]:
        found = _checked(events)
        self.called = self.called or any(isinstance(event, CallStart) for event in found)
        return found


def _begun(make: ToolParsers, tools: Sequence[dict[str, Any]], context: ChoiceContext) -> ToolParser:
    parser = make(tools)
    parser.begin(context)
    return parser


def _checked(events: Iterable[Event]) -> list[Event]:
    """Return the events that a parser returned. Raises TypeError where one is not an event."""
    found = list(events)
    for event in found:
        if not isinstance(event, Event):
            raise TypeError(f"{type(event).__name__} is not an event")
    return found


def join_events(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return the fewest events with the same meaning, without empty texts, and with characters that an answer can
    hold.
    """
    kept = (event for event in events if not isinstance(event, Content | Reasoning) or event.text)
    return tuple(map(_encodable, join(kept)))


def _encodable(event: Event) -> Event:
    """Return the event with U+FFFD in place of lone surrogates, which a parser may make of JSON escapes and no answer
    can hold.
    """
    match event:
        case Content(text) | Reasoning(text):
            return event if _sound(text) else type(event)(_mended(text))
        case CallStart(index, id, name):
            return event if _sound(id + name) else CallStart(index, _mended(id), _mended(name))
        case CallArguments(index, fragment):
            return event if _sound(fragment) else CallArguments(index, _mended(fragment))
    return event


def _sound(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _mended(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
