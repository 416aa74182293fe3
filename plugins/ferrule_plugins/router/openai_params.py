"""The conversion of a body to the service's parameters, and the values that both OpenAI routes keep while they
answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ferrule import log
from ferrule.config import RouterSettings
from ferrule.errors import RequestError
from ferrule.interfaces.router import RequestInfo, RouterContext
from ferrule.interfaces.service import Admitted, Generate, Output, Service, Usage
from ferrule.sampling_params import Beam
from ferrule.schema import REQUEST_ID
from ferrule.structured_outputs import constraint_of
from ferrule.types import Targets, TokenLogprobs
from ferrule_plugins.router.openai_answers import PromptLogprob, PromptLogprobs, UsageInfo
from ferrule_plugins.router.openai_fields import review
from ferrule_plugins.router.openai_schema import NOTES, GenerateBody
from ferrule_protocol import Notes, fingerprint, finite

_logger = log.get("openai")

_LOGGED = 1024  # characters of a note that the log repeats


def check(body: GenerateBody, config: RouterSettings) -> None:
    """Refuse fields that do not go together, or that this server cannot serve."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs cannot be streamed.", "prompt_logprobs")
    if body.priority and config.scheduler.scheduling_policy == "fcfs":
        raise RequestError("priority needs a server started with --scheduling-policy priority.", "priority")
    for name in ("target_first_token_ms", "target_inter_token_ms"):
        if getattr(body, name) is not None and getattr(config.scheduler, name) is None:
            raise RequestError(f"{name} needs a server started with --{name.replace('_', '-')}.", name)
    if body.use_beam_search and (field := constraint_of(body)):
        raise RequestError(f"{field} cannot be combined with use_beam_search.", field)


def targets(body: GenerateBody) -> Targets:
    return Targets((body.target_first_token_ms or 0) / 1000, (body.target_inter_token_ms or 0) / 1000)


def processors(body: GenerateBody) -> tuple[str | dict[str, Any], ...]:
    """Return the logits processors, each as a qualified name or as {qualname, args, kwargs}."""
    given = body.logits_processors or ()
    return tuple(item if isinstance(item, str) else item.model_dump(exclude_none=True) for item in given)


def beam(body: GenerateBody) -> Beam | None:
    """Return the beam search that a request asks for: `n` beams, or `best_of` beams of which the `n` best are
    returned.
    """
    if not body.use_beam_search:
        return None
    width = body.n if body.best_of is None else body.best_of
    return Beam(width=width, length_penalty=body.length_penalty, early_stopping=body.early_stopping)


@dataclass(frozen=True)
class Asked:
    """One request: the fields that its answers repeat, and how tokens are shown."""

    id: str
    created: int
    model: str
    fingerprint: str
    service: Service
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
            service.resolve(request.model)  # of two mistakes, an unknown model is reported
            raise
        header = info.headers.get("x-request-id", "")
        name = f"{prefix}-{body.request_id or (header if REQUEST_ID.fullmatch(header) else info.id)}"
        admitted = await service.admit(replace(request, answer_id=name))
        front = config.frontend
        options = body.stream_options
        include_usage = options is not None and bool(options.include_usage)
        as_ids, with_ids = body.return_tokens_as_token_ids, body.return_token_ids
        _log_notes(name, body, config)
        asked = cls(
            id=name,
            created=int(time.time()),
            model=admitted.model,
            fingerprint=fingerprint(service),
            service=service,
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
        return f"token_id:{token_id}" if self.token_names else self.service.token_text(token_id)

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


def finish_of(output: Output) -> str | None:
    """Return the finish reason to show."""
    return None if output.finish is None else output.finish.value


def _log_notes(answer_id: str, body: GenerateBody, config: RouterSettings) -> None:
    """Log `user`, `metadata` and the like, which have no other effect."""
    notes = {name: str(value)[:_LOGGED] for name in NOTES if (value := getattr(body, name, None))}
    if notes and not config.frontend.disable_log_requests:
        _logger.info("request notes", id=answer_id, **notes)
