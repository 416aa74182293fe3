"""The form of Ollama's answers: `lines` writes an output as lines of a stream, `whole` an answer as one of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from pydantic_core import from_json

from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Event
from ferrule.interfaces.service import Admitted, Answer, Output, Outputs, Service, ToolCall
from ferrule.types import FinishReason, TokenLogprobs
from ferrule_plugins.router.ollama.answers import OllamaCall, OllamaLogprob, OllamaSaidMessage, OllamaTopLogprob
from ferrule_protocol import Extension, finite


def now() -> str:
    """Return the time as answers have it: 2026-01-31T12:00:00.123456Z."""
    text: str = msgspec.to_builtins(datetime.now(UTC))  # much sooner than isoformat, and it is asked for each token
    return text


class Form(ABC):
    """The form of the answer to one request. `lines` is called with the outputs in their order: it knows the calls that
    have not ended, and when the first output came. `began` is when the request came, in nanoseconds.
    """

    def __init__(self, admitted: Admitted, service: Service, began: int, extension: Extension | None) -> None:
        self._model = admitted.model
        self._spell = (admitted.tokens or service).token_bytes
        self._began, self._first = began, 0
        self._calls = Calls()
        self._head: dict[str, Any] = {} if extension is None else {"ferrule": extension}

    @abstractmethod
    def said(self, text: str, thoughts: str, calls: list[OllamaCall]) -> dict[str, Any]:
        """Return the field, or the fields, with what the model said."""

    def see(self, output: Output) -> None:
        """Note an output as it comes."""
        if not self._first:
            self._first = time.perf_counter_ns()

    def lines(self, output: Output) -> list[dict[str, Any]]:
        """Return the lines of a stream that carry an output: what is new, and the end."""
        self.see(output)
        found = []
        said, logprobs = self._read(output), self._logprobs(output)
        if any(said) or logprobs:
            found.append(self._line(self.said(*said), done=False) | logprobs | self._head)
            self._head = {}
        if output.finish is not None:
            found.append(self._line(self.said("", "", []), done=True) | self._end(output) | self._head)
        return found

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the whole answer."""
        (output,) = answer.choices
        said = self.said(*self._read(output))
        return self._line(said, done=True) | self._logprobs(output) | self._end(output) | self._head

    def _line(self, said: dict[str, Any], done: bool) -> dict[str, Any]:
        return {"model": self._model, "created_at": now(), **said, "done": done}

    def _end(self, output: Output) -> dict[str, Any]:
        """Return the reason and the figures. Durations are at least 1 ns: clients divide by them."""
        end = time.perf_counter_ns()
        return {
            "done_reason": "stop" if output.finish is FinishReason.STOP else "length",
            "total_duration": end - self._began,
            "load_duration": 0,
            "prompt_eval_count": output.usage.prompt_tokens,
            "prompt_eval_duration": max(1, self._first - self._began),
            "eval_count": output.usage.completion_tokens,
            "eval_duration": max(1, end - self._first),
        }

    def _read(self, output: Output) -> tuple[str, str, list[OllamaCall]]:
        """Return the text, the thoughts and the calls of an output. A call comes when it has ended; one whose arguments
        are not an object is text, because Ollama's clients refuse it.
        """
        text, calls = output.text, list[OllamaCall]()
        for index, call in self._calls.take(output.events, last=output.finish is not None):
            arguments = _arguments(call.arguments)
            if isinstance(arguments, dict):
                calls.append({"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}})
            else:
                text += msgspec.json.encode({"name": call.name, "arguments": call.arguments}).decode()
        return text, output.reasoning, calls

    def _logprobs(self, output: Output) -> dict[str, list[OllamaLogprob]]:
        return {"logprobs": [self._logprob(entry) for entry in output.logprobs]} if output.logprobs else {}

    def _logprob(self, entry: TokenLogprobs) -> OllamaLogprob:
        top = [self._likely(*each) for each in entry.top]
        return {**self._likely(entry.token_id, entry.logprob), "top_logprobs": top}

    def _likely(self, token_id: int, logprob: float) -> OllamaTopLogprob:
        spelt = self._spell(token_id)
        return {"token": spelt.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(spelt)}


class ChatForm(Form):
    """The form of the answers of ``/api/chat``."""

    def said(self, text: str, thoughts: str, calls: list[OllamaCall]) -> dict[str, Any]:
        message: OllamaSaidMessage = {"role": "assistant", "content": text}
        if thoughts:
            message["thinking"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateForm(Form):
    """The form of the answers of ``/api/generate``. With `ids`, those of the prompt, the end has the `context`."""

    def __init__(
        self,
        admitted: Admitted,
        service: Service,
        began: int,
        extension: Extension | None,
        ids: Iterable[int] | None,
    ) -> None:
        super().__init__(admitted, service, began, extension)
        self._ids = None if ids is None else list(ids)

    def said(self, text: str, thoughts: str, calls: list[OllamaCall]) -> dict[str, Any]:
        return {"response": text, "thinking": thoughts} if thoughts else {"response": text}

    def see(self, output: Output) -> None:
        super().see(output)
        if self._ids is not None:
            self._ids += output.token_ids

    def _end(self, output: Output) -> dict[str, Any]:
        end = super()._end(output)
        return end if self._ids is None else end | {"context": self._ids}


async def events(form: Form, outputs: AsyncIterator[Output]) -> AsyncIterator[dict[str, Any]]:
    """Yield the lines of a stream."""
    async for output in outputs:
        if output.finish is FinishReason.ERROR:
            raise output.failure()
        for line in form.lines(output):
            yield line


class Seen(Outputs):
    """Outputs that a form sees as they come, so that a whole answer knows when its first token came."""

    def __init__(self, form: Form, outputs: Outputs) -> None:
        self._form, self._outputs = form, outputs

    async def __anext__(self) -> Output:
        output = await anext(self._outputs)
        self._form.see(output)
        return output

    async def aclose(self) -> None:
        await self._outputs.aclose()


class Calls:
    """The calls of a choice that have begun and not ended."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[CallStart, list[str]]] = {}

    def take(self, events: Iterable[Event], last: bool) -> list[tuple[int, ToolCall]]:
        """Return the calls that end in these events, each with its number; after the `last` event all have ended."""
        ended = []
        for event in events:
            match event:
                case CallStart(index):
                    self._open[index] = event, []
                case CallArguments(index, fragment) if index in self._open:
                    self._open[index][1].append(fragment)
                case CallEnd(index) if index in self._open:
                    ended.append(self._ended(index))
        return ended + [self._ended(index) for index in list(self._open)] if last else ended

    def _ended(self, index: int) -> tuple[int, ToolCall]:
        start, fragments = self._open.pop(index)
        return index, ToolCall(start.id, start.name, "".join(fragments))


def _arguments(text: str) -> Any:
    """Return arguments, whose end may be missing; None where they are not JSON."""
    try:
        return from_json(text or "{}", allow_partial=True)
    except ValueError:
        return None
