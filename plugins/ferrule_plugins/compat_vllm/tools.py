"""A tool parser written for vLLM, behind Ferrule's interface."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from ferrule.forms import GrammarSpec
from ferrule.interfaces.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    ChoiceContext,
    Content,
    Event,
    TextDelta,
    ToolParser,
)
from ferrule.interfaces.plugins import log_fault
from ferrule_plugins.compat_vllm.helpers import make_tool_call_id
from ferrule_plugins.compat_vllm.wrapped import has_parameter, method_of, request_of, tokenizer_of, with_request


class VllmToolParser(ToolParser):
    """A tool parser of vLLM as one of Ferrule. `wrapped` is the file's class, `title` its name in logs.

    A streamed answer goes through `extract_tool_calls_streaming`, delta by delta; another goes through
    `extract_tool_calls` when it is whole. A class that has only one of them is used that way for both. An exception of
    the class is logged, and the answer is content from there on.
    """

    wrapped: ClassVar[type]
    title: ClassVar[str]

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tools)
        self._begun = False
        self._calls = _Calls()
        self._text = ""
        self._ids: list[int] = []

    def begin(self, context: ChoiceContext) -> None:
        self._begun = True
        kwargs = {"tools": request_of(context).tools} if has_parameter(self.wrapped, "tools") else {}
        self._parser = self.wrapped(tokenizer_of(context), **kwargs)
        request = request_of(context)
        self._request = self._parser.adjust_request(request) or request
        self.wants_special_tokens = not self._request.skip_special_tokens
        whole = method_of(self._parser, "extract_tool_calls")
        by_delta = method_of(self._parser, "extract_tool_calls_streaming")
        self._extract: Any = None if whole is None else with_request(whole, 2)
        self._by_delta = None if by_delta is None else with_request(by_delta, 7)
        if whole is not None and not context.streamed:
            self._by_delta = None
        self._broken = False

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        """Return None: calls are read, not enforced."""
        return None

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        if not self._begun:
            self.begin(ChoiceContext(tools=tuple(self.tools)))
        if self._broken:
            return [Content(delta.text)]
        text, ids = self._text, self._ids
        self._text, self._ids = text + delta.text, [*ids, *delta.token_ids]
        if self._by_delta is None:
            return []
        try:
            message = self._by_delta(text, self._text, delta.text, ids, self._ids, list(delta.token_ids), self._request)
            return self._calls.read(message) if message is not None else []
        except Exception:
            return [*self._give_up(), Content(delta.text)]

    def finish(self) -> Sequence[Event]:
        if not self._begun or self._broken:
            return self._calls.end()
        try:
            if self._by_delta is None:
                return [*self._whole(), *self._calls.end()]
            return [*self._held_back(), *self._calls.rest(self._parser.prev_tool_call_arr), *self._calls.end()]
        except Exception:
            lost = [Content(self._text)] if self._by_delta is None and self._text else []
            return [*self._give_up(), *lost]

    def _whole(self) -> list[Event]:
        found = self._extract(self._text, self._request)
        events: list[Event] = [Content(found.content)] if found.content else []
        for index, call in enumerate(found.tool_calls if found.tools_called else ()):
            events += self._calls.add(index, call.id, call.function.name, call.function.arguments)
        return events

    def _held_back(self) -> list[Event]:
        end = getattr(self._parser, "end_of_stream", None)  # of our stand-ins only
        message = end() if end is not None else None
        return self._calls.read(message) if message is not None else []

    def _give_up(self) -> list[Event]:
        log_fault(self.title, "an answer", "the rest of it is content")
        self._broken = True
        return self._calls.end()


class _Calls:
    """The calls of one answer, as vLLM's deltas number them."""

    def __init__(self) -> None:
        self._open: int | None = None
        self._sent: dict[int, str] = {}  # of each call that was started, its arguments
        self._waiting: dict[int, str] = {}  # arguments that came before the name

    def read(self, message: Any) -> list[Event]:
        """Return the events of a `DeltaMessage`."""
        events: list[Event] = [Content(message.content)] if message.content else []
        for call in message.tool_calls or ():
            function = call.function
            if function is not None:
                events += self.add(call.index, call.id, function.name, function.arguments)
        return events

    def add(self, index: int, call_id: str | None, name: str | None, arguments: str | None) -> list[Event]:
        events: list[Event] = []
        if index not in self._sent:
            if not name:
                self._waiting[index] = self._waiting.get(index, "") + (arguments or "")
                return events
            events += [*self.end(), CallStart(index, call_id or make_tool_call_id(), name)]
            self._open = index
            self._sent[index] = ""
            arguments = self._waiting.pop(index, "") + (arguments or "")
        if arguments:
            self._sent[index] += arguments
            events.append(CallArguments(index, arguments))
        return events

    def rest(self, calls: Sequence[Any]) -> list[Event]:
        """Return the events for the part of the last call's arguments that the parser has read and left to the server
        to send.
        """
        index = self._open
        if index is None or index >= len(calls):
            return []
        arguments = calls[index].get("arguments", "")
        whole = arguments if isinstance(arguments, str) else _dumped(arguments)
        sent = self._sent[index]
        return self.add(index, None, None, whole[len(sent) :]) if whole.startswith(sent) else []

    def end(self) -> list[Event]:
        if self._open is None:
            return []
        index, self._open = self._open, None
        return [CallEnd(index)]


def _dumped(arguments: Any) -> str:
    """Write JSON as vLLM's parsers do. NaN and the infinities, which JSON does not have, become null."""
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(msgspec.json.decode(msgspec.json.encode(arguments)), ensure_ascii=False)


def wrap_tool_parser(found: type, title: str) -> type[VllmToolParser]:
    """Make a parser class of Ferrule around one of vLLM."""
    return type(found.__name__, (VllmToolParser,), {"wrapped": found, "title": title, "__doc__": found.__doc__})
