"""The form of an answer of the Messages route: `chunk` writes an output as events, `whole` an answer as a message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, join
from ferrule.interfaces.service import Answer, Output, Usage
from ferrule.types import FinishReason
from ferrule_plugins.router.anthropic.answers import ContentBlock, Message, MessageEvent, MessageUsage
from ferrule_plugins.router.anthropic.conversation import signature_of
from ferrule_protocol import Extension, shown


class MessageForm:
    """The form of one request's answer. `chunk` is called with the outputs in their order: it knows the open block."""

    def __init__(self, message_id: str, model: str, many_calls: bool, extension: Extension | None) -> None:
        self._id, self._model, self._extension = message_id, model, extension
        self._many_calls = many_calls
        self._started = False
        self._number = -1  # of the last block
        self._open: type[Event] | None = None  # the sort of events that the open block takes
        self._thoughts: list[str] = []  # of the open block

    def whole(self, answer: Answer) -> Message:
        """Return the whole message."""
        (output,) = answer.choices
        return self._message(list(self._content(output.events)), output)

    def chunk(self, output: Output) -> list[MessageEvent]:
        """Return the events of a stream that carry an output."""
        found: list[MessageEvent] = []
        if not self._started:
            self._started = True
            found.append({"type": "message_start", "message": self._message([], Output(index=0, usage=output.usage))})
            found.append({"type": "ping"})
        for event in shown(output.events, self._many_calls):
            found += self._written(event)
        if output.finish is not None:
            found += self._closed()
            delta: Any = {"stop_reason": _stop_reason(output), "stop_sequence": _stop_sequence(output)}
            found.append({"type": "message_delta", "delta": delta, "usage": _usage(output.usage)})
            found.append({"type": "message_stop"})
        return found

    def _message(self, content: list[ContentBlock], output: Output) -> Message:
        message: Message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": _stop_reason(output),
            "stop_sequence": _stop_sequence(output),
            "usage": _usage(output.usage),
        }
        if self._extension is not None:
            message["ferrule"] = self._extension
        return message

    # -------------------------------------------------------------------------------------------- streams

    def _written(self, event: Event) -> Iterator[MessageEvent]:
        match event:
            case Content(text):
                if self._open is not Content:
                    yield from self._opened(Content, {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                if self._open is not Reasoning:
                    yield from self._opened(Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
                self._thoughts.append(text)
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallStart(_, call_id, name):
                yield from self._opened(CallArguments, {"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, fragment):
                yield self._delta({"type": "input_json_delta", "partial_json": fragment})
            case CallEnd():
                yield from self._closed()

    def _delta(self, delta: Any) -> MessageEvent:
        return {"type": "content_block_delta", "index": self._number, "delta": delta}

    def _opened(self, kind: type[Event], block: ContentBlock) -> Iterator[MessageEvent]:
        yield from self._closed()
        self._open = kind
        self._number += 1
        yield {"type": "content_block_start", "index": self._number, "content_block": block}

    def _closed(self) -> Iterator[MessageEvent]:
        if self._open is None:
            return
        if self._open is Reasoning:
            yield self._delta({"type": "signature_delta", "signature": signature_of("".join(self._thoughts))})
            self._thoughts = []
        self._open = None
        yield {"type": "content_block_stop", "index": self._number}

    # -------------------------------------------------------------------------------------------- whole answers

    def _content(self, events: Iterable[Event]) -> Iterator[ContentBlock]:
        joined = list(join(shown(events, self._many_calls)))
        arguments: dict[int, str] = {}
        for event in joined:
            if isinstance(event, CallArguments):
                arguments[event.index] = arguments.get(event.index, "") + event.fragment
        for event in joined:
            match event:
                case Content(text):
                    yield {"type": "text", "text": text}
                case Reasoning(text):
                    yield {"type": "thinking", "thinking": text, "signature": signature_of(text)}
                case CallStart(index, call_id, name):
                    given = _input(arguments.get(index, ""))
                    yield {"type": "tool_use", "id": call_id, "name": name, "input": given}


async def events(form: MessageForm, outputs: AsyncIterator[Output]) -> AsyncIterator[MessageEvent]:
    """Yield the events of a stream."""
    async for output in outputs:
        if output.finish is FinishReason.ERROR:
            raise output.failure()
        for event in form.chunk(output):
            yield event


def _input(arguments: str) -> Any:
    """Return arguments, whose end may be missing, as clients read them from a stream; as text if they are not JSON."""
    if not arguments:
        return {}
    try:
        return from_json(arguments, allow_partial=True)
    except ValueError:
        return arguments


def _stop_reason(output: Output) -> Any:
    if output.finish is None:
        return None
    if output.finish is not FinishReason.STOP:
        return "max_tokens"  # the answer is not complete
    if isinstance(output.stop_reason, str):
        return "stop_sequence"
    return "tool_use" if output.called_tools else "end_turn"


def _stop_sequence(output: Output) -> str | None:
    return output.stop_reason if isinstance(output.stop_reason, str) else None


def _usage(usage: Usage) -> MessageUsage:
    """Return usage as Anthropic counts it: the three sorts of input tokens add up to the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
