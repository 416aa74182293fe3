"""The parse chain of one choice: text → reasoning parser → tool parser → events.

Both parsers are plugins and optional; without them text is content. Events of equal kind that follow each other are
joined, so a delta is as few events as possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

from ferrule.frontend.admission.admit import Prepared
from ferrule.frontend.guided.constraint import Parsers, told_of_calls, told_of_thoughts, tool_parser
from ferrule.frontend.output.stops import StopMatcher
from ferrule.frontend.text.detokenize import decode
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
)
from ferrule.interfaces.service import ChatPrompt, Generate, Prompt
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.plugin.faults import failing_request

_TAIL = 32  # ids of a prompt without text whose text parsers are shown


class ParseChain:
    """`tools` are the request's; without tools the tool parser does not run.

    What a parser raises is logged with its title, and is a RequestFailed here and in `feed` and `finish`.
    """

    __slots__ = (
        *("_parsers", "_reasoning", "_tools"),
        *("called", "parted", "special_tokens", "stops", "wants_special_tokens"),
    )

    def __init__(
        self, parsers: Parsers, tools: Sequence[dict[str, Any]] | None, context: ChoiceContext | None = None
    ) -> None:
        self._parsers = parsers
        self._reasoning: ReasoningParser | None = None
        self._tools: ToolParser | None = None
        self.stops: StopMatcher | None = None  # set where stop strings end the answer, and thoughts may hold them
        self.parted = (0, 0)  # characters of thoughts, and of what is not thoughts, that the last text brought
        context, special = context or ChoiceContext(), False
        with self._tools_fault("begin"):
            calls = tool_parser(parsers.tools, tools, context)
            if calls is not None:
                self._tools = calls[0]
                special = self._tools.wants_special_tokens
                context = told_of_calls(context, tools, self._tools)
        if parsers.reasoning:
            with self._reasoning_fault("begin"):
                self._reasoning = parsers.reasoning()
                self._reasoning.begin(context)
                special = self._reasoning.wants_special_tokens or special
                context = told_of_thoughts(context, self._reasoning)
            if context.new_tool_parser is not None:
                with self._tools_fault("begin"):
                    self._tools = context.new_tool_parser(context)
        self.called = None if self._tools is None else False  # whether the text held a call
        self.wants_special_tokens = special
        chosen = [parser for parser in (self._reasoning, self._tools) if parser is not None]
        self.special_tokens = tuple(text for parser in chosen for text in parser.special_tokens)

    @property
    def parts_thoughts(self) -> bool:
        return self._reasoning is not None

    def feed(self, text: str, token_ids: tuple[int, ...] = (), may_stop: bool = True) -> tuple[Event, ...]:
        """Events of new text and the ids that it came from; `may_stop`: stop strings in it count."""
        if self._reasoning is None and self._tools is None:
            return (Content(text),) if text else ()
        events: Iterable[Event] = (Content(text),)
        if self._reasoning is not None:
            with self._reasoning_fault("feed"):
                events = self._part(self._reasoning.feed(TextDelta(text, token_ids)))
        if may_stop:
            events = self._stop(events)
        return join_events(self._read_calls(list(events), token_ids))

    def finish(self) -> tuple[Event, ...]:
        """Events of what the parsers held back."""
        if self._reasoning is None and self._tools is None:
            return ()
        rest: list[Event] = []
        self.parted = (0, 0)
        if self._reasoning is not None and not self.stopped:
            with self._reasoning_fault("finish"):
                rest = self._part(self._reasoning.finish())
            rest = self._stop(rest)
        if self.stops is not None and not self.stopped:
            rest.append(Content(self.stops.finish()))
        events = self._read_calls(rest, ())
        if self._tools is not None:
            with self._tools_fault("finish"):
                events += self._note(self._tools.finish())
        return join_events(events)

    @property
    def stopped(self) -> bool:
        """Whether one of the stop strings has ended the answer. Nothing but the end is to follow."""
        return self.stops is not None and self.stops.matched is not None

    def _stop(self, events: Iterable[Event]) -> list[Event]:
        """What comes before a stop string in the text that is not thoughts."""
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
        if self._tools is None:
            return events
        last = max((i for i, event in enumerate(events) if isinstance(event, Content)), default=-1)
        read: list[Event] = []
        for i, event in enumerate(events):
            if isinstance(event, Content):
                with self._tools_fault("feed"):
                    read += self._note(self._tools.feed(TextDelta(event.text, token_ids if i == last else ())))
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


def open_chain(parsers: Parsers, request: Generate, context: ChoiceContext) -> ParseChain:
    """The chain of one choice."""
    return ParseChain(Parsers(), None) if request.raw else ParseChain(parsers, request.tools, context)


def choice_context(
    request: Generate, prompt: Prompt | ChatPrompt, prepared: Prepared, tokenizer: Tokenizer | None
) -> ChoiceContext:
    """What parsers are told of the choices of one of the request's prompts, as it was read."""
    budget = request.params.thinking_token_budget
    if request.raw and budget is None and request.grammar is None and request.params.grammar is None:
        return ChoiceContext()  # no parser and no constraint will read it
    text, chat = prepared.text, prompt if isinstance(prompt, ChatPrompt) else None
    if text is None and tokenizer is not None:
        text = decode(tokenizer, prepared.ids[-_TAIL:], skip_special_tokens=False)
    continued = chat.messages[-1].get("content") if chat and chat.continue_final_message else None
    return ChoiceContext(
        prompt=text or "",
        prompt_ids=prepared.ids,
        continued=continued if isinstance(continued, str) else "",
        tools=request.tools or (),
        tool_choice=request.tool_choice,
        template_kwargs=(chat and chat.chat_template_kwargs) or {},
        parallel_tool_calls=request.parallel_tool_calls,
        templated=chat is not None,
        streamed=request.streamed,
        tokenizer=tokenizer,
    )


def _checked(events: Iterable[Event]) -> list[Event]:
    """What a parser returned. Raises TypeError where it is something else than events."""
    found = list(events)
    for event in found:
        if not isinstance(event, Event):
            raise TypeError(f"{type(event).__name__} is not an event")
    return found


def join_events(events: Iterable[Event]) -> tuple[Event, ...]:
    """As few events as say the same: texts of one kind that follow each other are one."""
    joined: list[Event] = []
    kept = (event for event in events if not isinstance(event, Content | Reasoning) or event.text)
    for kind, group in groupby(kept, type):
        if kind is Content or kind is Reasoning:
            joined.append(kind("".join(event.text for event in group)))  # type: ignore[union-attr]
        else:
            joined += group
    return tuple(map(_encodable, joined))


def _encodable(event: Event) -> Event:
    """The event with U+FFFD for surrogates without a partner, which a parser may make of JSON escapes: no answer can
    hold them."""
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
