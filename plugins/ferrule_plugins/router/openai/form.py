"""The answer side of both OpenAI routes: the values that answers repeat of a request, and their form.

Each route has a `Form`, whose `chunk` writes an output and whose `whole` an answer.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ferrule import log
from ferrule.errors import RequestError
from ferrule.interfaces.router import JSON, EventStream, RequestInfo, RouterContext
from ferrule.interfaces.service import Admitted, Answer, Generate, Output, Tokens, Usage
from ferrule.schema import REQUEST_ID
from ferrule.types import FinishReason, TokenLogprobs
from ferrule_plugins.router.openai.answers import PromptLogprob, PromptLogprobs, UsageInfo
from ferrule_plugins.router.openai.params import review
from ferrule_plugins.router.openai.schema import NOTES, GenerateBody
from ferrule_protocol import Closing, Extension, Meter, Notes, fingerprint, finite

_logger = log.get("openai")

_LOGGED = 1024  # characters of a note that the log repeats


@dataclass(frozen=True)
class Asked:
    """One request: the fields that its answers repeat, and how tokens are shown."""

    id: str
    created: int
    model: str
    fingerprint: str
    tokens: Tokens
    token_names: bool  # show tokens as token_id:N
    token_ids: bool  # return_token_ids; without a tokenizer the ids are all that there is
    cached_details: bool
    reasons: bool  # a reasoning parser runs
    num_per_prompt: int  # choices per prompt
    include_usage: bool  # a stream ends with the usage of all choices
    each_usage: bool  # each chunk has the usage of its choice so far
    notes: Notes

    @classmethod
    async def admit(
        cls, prefix: str, body: GenerateBody, info: RequestInfo, request: Generate, ctx: RouterContext
    ) -> tuple[Asked, Admitted]:
        """Have a request admitted."""
        service, config = ctx.service, ctx.config
        try:
            notes = review(body, info.unknown_fields, ctx)
        except RequestError:
            await service.resolve(request.model)  # of two mistakes, an unknown model is reported
            raise
        header = info.headers.get("x-request-id", "")
        name = f"{prefix}-{body.request_id or (header if REQUEST_ID.fullmatch(header) else info.id)}"
        admitted = await service.admit(replace(request, answer_id=name))
        front = config.frontend
        options = body.stream_options
        include_usage = options is not None and bool(options.include_usage)
        as_ids, with_ids = body.return_tokens_as_token_ids, body.return_token_ids
        told = {name: str(value)[:_LOGGED] for name in NOTES if (value := getattr(body, name, None))}
        if told and not front.disable_log_requests:
            _logger.info("request notes", id=name, **told)
        asked = cls(
            id=name,
            created=int(time.time()),
            model=admitted.model,
            fingerprint=fingerprint(service),
            tokens=admitted.tokens or service,
            token_names=front.return_tokens_as_token_ids if as_ids is None else as_ids,
            token_ids=config.skip_tokenizer_init if with_ids is None else with_ids,
            cached_details=front.enable_prompt_tokens_details,
            reasons=bool(front.reasoning_parser) and not request.raw,
            num_per_prompt=request.params.n,
            include_usage=include_usage,
            each_usage=include_usage and options is not None and bool(options.continuous_usage_stats),
            notes=notes,
        )
        return asked, admitted

    def token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.token_names else self.tokens.token_text(token_id)

    def usage(self, total: Usage) -> UsageInfo:
        """Return the usage of all choices, with the details that this server reports."""
        told = usage_of(total)
        if self.cached_details:
            told["prompt_tokens_details"] = {"cached_tokens": total.cached_tokens}
        if self.reasons:
            told["completion_tokens_details"] = {"reasoning_tokens": total.reasoning_tokens}
        return told

    def prompt_logprobs(self, entries: tuple[TokenLogprobs | None, ...]) -> PromptLogprobs:
        """Return the log-probabilities of each prompt token, by token id: the prompt's own token, then the most likely
        ones.
        """
        return [None if entry is None else self._ranked(entry) for entry in entries]

    def _ranked(self, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        ranked = {str(entry.token_id): self._rank(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            ranked.setdefault(str(token_id), self._rank(token_id, logprob, rank))
        return ranked

    def _rank(self, token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": self.token(token_id)}


def usage_of(usage: Usage) -> UsageInfo:
    """Return usage without details."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": None,
    }


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
    def choice(self, output: Output) -> Mapping[str, Any]:
        """Return a choice of a whole answer."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the answer to a request that does not stream."""
        choices = [self.choice(output) for output in answer.choices]
        return {**self._written(self.kind, choices), **self.head, "usage": self.asked.usage(answer.usage)}

    def chunk_of(self, choice: Mapping[str, Any], output: Output) -> dict[str, Any]:
        """Return a chunk with one choice, which has the field "usage" in a stream that reports usage."""
        chunk = self._written(self.chunk_kind, [choice])
        if self.asked.include_usage:
            chunk["usage"] = usage_of(output.usage) if self.asked.each_usage else None
        return chunk

    def last_chunk(self, total: Usage) -> dict[str, Any]:
        """Return the chunk with the usage of all choices, which ends a stream that reports usage."""
        return {**self._written(self.chunk_kind, []), "usage": self.asked.usage(total)}

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
        yield form.last_chunk(meter.total())
