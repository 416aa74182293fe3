"""The chunks of a streamed answer, of either route, and their fold."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct


class Function(Struct):
    name: str | None = None
    arguments: str | None = None


class CallDelta(Struct):
    index: int = 0
    id: str | None = None
    function: Function | None = None


class Delta(Struct):
    """New content of a message. `reasoning_content` and `reasoning` are two names of one text; a server may send
    both.
    """

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class Choice(Struct):
    """One choice of a chunk. An answer that was not streamed has `message` instead of `delta`; a completion has
    `text`.
    """

    index: int = 0
    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Details(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class Chunk(Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None
    ferrule: Any = None  # an extension: {"warnings": [...]} are fields of the request that did nothing


def read_chunk(data: bytes) -> Chunk:
    """Parse a chunk. Raises ValueError for data that is not a chunk."""
    try:
        return msgspec.convert(json.loads(data.decode("utf-8", "replace")), Chunk)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class Fragment:
    """A part of an answer to show next.

    `number` tells calls apart; `text` is the function's name at the start of a call, and then its arguments.
    """

    kind: Literal["text", "thought", "call", "arguments"]
    text: str
    number: int = 0


@dataclass
class Called:
    id: str
    name: str
    arguments: str = ""


@dataclass
class ShownAnswer:
    """One answer as far as it has come. Times are `time.perf_counter` seconds."""

    start: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    chunks: int = 0  # that had something to show
    text: str = ""
    calls: dict[int, Called] = field(default_factory=dict)
    finish: str | None = None
    usage: Usage | None = None
    warnings: list[str] = field(default_factory=list)

    def take(self, chunk: Chunk) -> Iterator[Fragment]:
        """Add a chunk; yield the new fragments in it."""
        self.usage = chunk.usage or self.usage
        if isinstance(chunk.ferrule, dict):
            self.warnings += map(str, chunk.ferrule.get("warnings") or ())
        for choice in chunk.choices:
            if choice.index != 0:  # one answer is shown, also when several were asked for
                continue
            self.finish = choice.finish_reason or self.finish
            fragments = [fragment for fragment in self._fragments(choice) if fragment.text]
            if fragments:
                self.last = time.perf_counter()
                self.first = self.last if self.first is None else self.first
                self.chunks += 1
            yield from fragments

    def _fragments(self, choice: Choice) -> Iterator[Fragment]:
        delta = choice.delta or choice.message or Delta(content=choice.text)
        yield Fragment("thought", delta.reasoning_content or delta.reasoning or "")
        for text in (delta.content, delta.refusal):
            self.text += text or ""
            yield Fragment("text", text or "")
        for place, call in enumerate(delta.tool_calls or ()):
            # a whole message has no indices: its calls are told apart by their places
            number = place if choice.delta is None else call.index
            function = call.function or Function()
            if number not in self.calls:
                self.calls[number] = Called(call.id or f"call_{number}", function.name or "?")
                yield Fragment("call", self.calls[number].name, number)
            self.calls[number].arguments += function.arguments or ""
            yield Fragment("arguments", function.arguments or "", number)


@dataclass
class Figures:
    """Sums over the answers of a session. `seconds` are those of the streams."""

    answers: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    def add(self, answer: ShownAnswer) -> None:
        self.answers += 1
        self.prompt_tokens += answer.usage.prompt_tokens if answer.usage else 0
        self.output_tokens += output_tokens(answer)
        self.seconds += max(answer.last - answer.start, 0.0)

    def told(self) -> str:
        rate = f", {self.output_tokens / self.seconds:.1f} tokens/s" if self.seconds else ""
        noun = "answer" if self.answers == 1 else "answers"
        return f"session: {self.answers} {noun}, prompts {self.prompt_tokens}, output {self.output_tokens} tokens{rate}"


def output_tokens(answer: ShownAnswer) -> int:
    """Return the number of tokens that the server counted; without that, its chunks, which are tokens on most
    servers.
    """
    counted = answer.usage.completion_tokens if answer.usage else None
    return answer.chunks if counted is None else counted


def told(answer: ShownAnswer) -> str:
    """Return one line about one answer: time to the first token, output rate after it, tokens."""
    if answer.first is None:
        return "no tokens came"
    tokens = output_tokens(answer)
    span = answer.last - answer.first
    rate = f", {(tokens - 1) / span:.1f} tokens/s" if tokens > 1 and span > 0 else ""
    usage = answer.usage
    prompt = ""
    if usage is not None:
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
        prompt = f", prompt {usage.prompt_tokens}" + (f" ({cached} cached)" if cached else "")
    about = "" if usage else "about "
    return f"first token after {(answer.first - answer.start) * 1000:.0f} ms{rate}, output {about}{tokens}{prompt}"
