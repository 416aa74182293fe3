"""The form of the OpenAI routes' answers: each route has a `Form`, whose `chunk` writes an output and whose `whole` an
answer.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ferrule.interfaces.router import JSON, EventStream
from ferrule.interfaces.service import Admitted, Answer, Output
from ferrule.types import FinishReason
from ferrule_plugins.router.openai_answers import UsageInfo
from ferrule_plugins.router.openai_params import Asked, usage_of
from ferrule_protocol import Closing, Extension, Meter


class Form(ABC):
    """The form of the answer to one request. `chunk` and `whole` have no effect besides their return values."""

    kind: str  # the field "object" of a whole answer
    chunk_kind: str

    def __init__(self, asked: Asked, extension: Extension | None) -> None:
        self.asked = asked
        # Fields of a whole answer, or of the first chunk of a stream, beside its choices.
        self.head: dict[str, Any] = {} if extension is None else {"ferrule": extension}

    @abstractmethod
    def chunk(self, output: Output) -> list[dict[str, Any]]:
        """Return the chunks of a stream that carry an output; none for an output without news."""

    @abstractmethod
    def choices(self, answer: Answer) -> Sequence[Mapping[str, Any]]:
        """Return the choices of a whole answer."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the answer to a request that does not stream."""
        usage = self.asked.usage(answer.usage)
        return self._written(self.kind, self.choices(answer)) | self.head | {"usage": usage}

    def chunk_of(self, choices: Sequence[Mapping[str, Any]], usage: UsageInfo | None) -> dict[str, Any]:
        """Return a chunk, which has the field "usage" in a stream that reports usage."""
        chunk = self._written(self.chunk_kind, choices)
        if self.asked.include_usage:
            chunk["usage"] = usage
        return chunk

    def usage_so_far(self, output: Output) -> UsageInfo | None:
        """Return the usage of an output's choice, where each chunk reports it."""
        return usage_of(output.usage) if self.asked.each_usage else None

    def _written(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        asked = self.asked
        return {
            "id": asked.id,
            "object": kind,
            "created": asked.created,
            "model": asked.model,
            "choices": choices,
            "system_fingerprint": asked.fingerprint,
        }


async def respond(form: Form, admitted: Admitted, streamed: bool) -> JSON | EventStream:
    """Answer a request that was admitted, as a stream or as a whole."""
    headers = form.asked.notes.headers
    if streamed:
        outputs = admitted.outputs()
        return EventStream(Closing(_chunks(form, outputs, len(admitted.prompts)), outputs), headers)
    answer = await admitted.answer()
    if any(choice.logprobs or choice.prompt_logprobs for choice in answer.choices):
        # There may be hundreds of thousands of them: other requests go on meanwhile.
        return JSON(await asyncio.to_thread(form.whole, answer), headers=headers)
    return JSON(form.whole(answer), headers=headers)


async def _chunks(form: Form, outputs: AsyncIterator[Output], num_prompts: int) -> AsyncIterator[dict[str, Any]]:
    asked, head = form.asked, form.head
    meter = Meter(num_prompts * asked.num_per_prompt, asked.num_per_prompt)
    async for output in outputs:
        if output.finish is FinishReason.ERROR:
            raise output.failure()
        meter.see(output)
        for chunk in form.chunk(output):
            yield {**chunk, **head} if head else chunk
            head = {}
    if asked.include_usage:
        yield form.chunk_of([], asked.usage(meter.total()))
