"""The form of an answer of the Responses routes: `chunk` writes an output as events, `whole` an answer as a response.

A whole response is the last event of the stream that the same answer would be, so both say the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from ferrule.interfaces.service import Answer, Output, Tokens, Usage
from ferrule.types import FinishReason, TokenLogprobs
from ferrule_plugins.router.responses.answers import (
    LogprobEntry,
    OutputItem,
    Response,
    ResponseEvent,
    ResponseUsage,
    Status,
)
from ferrule_plugins.router.responses.conversation import item_id, sealed
from ferrule_protocol import finite, shown


@dataclass
class _Open:
    """The item that grows: its text so far, in pieces, and the logprobs of these."""

    kind: type[Event]  # the sort of events that it takes
    item: OutputItem
    texts: list[str] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)


class ResponseForm:
    """The form of one request's answer. `begin`, `chunk` and `fail` are called in their order: it counts events.

    `head` has the fields of the response that do not change, `name` is its id without ``resp_``.
    """

    def __init__(self, head: Response, name: str, many_calls: bool, encrypts: bool, logprobs: Tokens | None) -> None:
        self._head, self._name = head, name
        self._many_calls = many_calls
        self._encrypts = encrypts
        self._spells = logprobs  # spells tokens; None: logprobs were not asked for
        self._number = -1  # of the last event
        self._output: list[OutputItem] = []  # the open item is its last one
        self._open: _Open | None = None
        self._logprobs: list[LogprobEntry] = []  # of tokens whose text has not come
        self._usage: Usage | None = None
        self.response = self.now("queued" if head["background"] else "in_progress")

    def whole(self, answer: Answer) -> Response:
        """Return the whole response."""
        (output,) = answer.choices
        self.chunk(output)
        return self.response

    def begin(self) -> list[ResponseEvent]:
        """Return the events with which a stream begins."""
        events = [self._lifecycle("created")]
        if self._head["background"]:
            events.append(self._lifecycle("queued"))
            self.response = self.now("in_progress")
        return [*events, self._lifecycle("in_progress")]

    def chunk(self, output: Output) -> list[ResponseEvent]:
        """Return the events of a stream that carry an output. `response` is whole after the last one."""
        found: list[ResponseEvent] = []
        self._usage = output.usage
        if self._spells is not None and output.logprobs:
            self._logprobs += [_logprob(entry, self._spells) for entry in output.logprobs]
        for event in shown(output.events, self._many_calls):
            found += self._written(event)
        if output.finish is not None:
            found += self._ended(output.finish)
        return found

    def fail(self, message: str, invalid: bool) -> list[ResponseEvent]:
        """Return the events that tell of a failure. What was generated so far stays, as incomplete."""
        found = list(self._closed("incomplete"))
        self.response = self.now("failed")
        self.response["error"] = {"code": "invalid_prompt" if invalid else "server_error", "message": message}
        return [*found, self._lifecycle("failed")]

    def now(self, status: Status) -> Response:
        """Return the response as it is now."""
        ended = status not in ("queued", "in_progress")
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._output),
            "usage": _usage(self._usage) if ended and self._usage is not None else None,
        }

    # -------------------------------------------------------------------------------------------- events

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}  # type: ignore[typeddict-item]

    def _lifecycle(self, kind: str) -> ResponseEvent:
        return self._event(f"response.{kind}", response=self.response)

    def _written(self, event: Event) -> Iterator[ResponseEvent]:
        match event:
            case Content(text):
                yield from self._of_kind(Content)
                logprobs, self._logprobs = self._logprobs, []
                if logprobs and self._open is not None:
                    self._open.logprobs += logprobs
                yield from self._grown("response.output_text.delta", text, content_index=0, logprobs=logprobs)
            case Reasoning(text):
                yield from self._of_kind(Reasoning)
                yield from self._grown("response.reasoning_text.delta", text, content_index=0)
            case CallStart(_, call_id, name):
                yield from self._closed("completed")
                item = self._item("function_call")
                item |= {"call_id": call_id, "name": name, "arguments": "", "status": "in_progress"}
                yield self._opened(CallArguments, item)
            case CallArguments(_, fragment):
                if fragment:
                    yield from self._grown("response.function_call_arguments.delta", fragment)
            case CallEnd():
                yield from self._closed("completed")

    def _grown(self, kind: str, delta: str, **fields: Any) -> Iterator[ResponseEvent]:
        """Yield the event about a piece of text of the open item; arguments without a call have none."""
        if (grows := self._open) is not None:
            grows.texts.append(delta)
            place = len(self._output) - 1
            yield self._event(kind, item_id=grows.item["id"], output_index=place, delta=delta, **fields)

    def _of_kind(self, kind: type[Event]) -> Iterator[ResponseEvent]:
        """Yield the events that open an item with texts of this sort, where none is open."""
        if self._open is not None and self._open.kind is kind:
            return
        yield from self._closed("completed")
        if kind is Content:
            item = self._item("message")
            item |= {"role": "assistant", "content": [], "status": "in_progress"}
        else:
            item = self._item("reasoning")
            item |= {"summary": [], "content": [], "status": "in_progress"}
        yield self._opened(kind, item)
        yield self._part("added", item, _text_part(kind, "", []))

    def _item(self, kind: Any) -> OutputItem:
        return {"id": item_id(kind, self._name, len(self._output)), "type": kind}

    def _opened(self, kind: type[Event], item: OutputItem) -> ResponseEvent:
        self._open = _Open(kind, item)
        self._output.append(item)
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _part(self, what: str, item: OutputItem, part: Any) -> ResponseEvent:
        place = len(self._output) - 1
        return self._event(
            f"response.content_part.{what}", item_id=item["id"], output_index=place, content_index=0, part=part
        )

    def _closed(self, status: Any) -> Iterator[ResponseEvent]:
        """Yield the events that close the open item, if there is one. Events that were made keep the item as it was."""
        if self._open is None:
            return
        opened, self._open = self._open, None
        text, place = "".join(opened.texts), len(self._output) - 1
        item: OutputItem = {**opened.item, "status": status}
        at: dict[str, Any] = {"item_id": item["id"], "output_index": place}
        if opened.kind is CallArguments:
            item["arguments"] = text
            yield self._event("response.function_call_arguments.done", **at, name=item["name"], arguments=text)
        else:
            part = _text_part(opened.kind, text, opened.logprobs)
            item["content"] = [part]
            at["content_index"] = 0
            if opened.kind is Content:
                yield self._event("response.output_text.done", **at, text=text, logprobs=opened.logprobs)
            else:
                yield self._event("response.reasoning_text.done", **at, text=text)
                if self._encrypts:
                    item["encrypted_content"] = sealed(text)
            yield self._part("done", item, part)
        self._output[place] = item
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _ended(self, finish: FinishReason) -> Iterator[ResponseEvent]:
        status: Status = "completed" if finish is FinishReason.STOP else "incomplete"
        if self._open is not None and self._open.kind is Content:
            self._open.logprobs += self._logprobs  # of tokens without a text, such as the one that ends the answer
        yield from self._closed(status)
        self.response = self.now(status)
        yield self._lifecycle(status)


def _text_part(kind: type[Event], text: str, logprobs: list[LogprobEntry]) -> Any:
    if kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> ResponseUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _logprob(entry: TokenLogprobs, tokens: Tokens) -> LogprobEntry:
    def shown(token_id: int, logprob: float) -> LogprobEntry:
        spelt = tokens.token_text(token_id)
        return {"token": spelt, "logprob": finite(logprob), "bytes": list(tokens.token_bytes(token_id))}

    return {**shown(entry.token_id, entry.logprob), "top_logprobs": [shown(*each) for each in entry.top]}
