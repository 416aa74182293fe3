"""From a body to what the service takes, and what both OpenAI routes keep while they answer."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from ferrule import __version__, log
from ferrule.config import Config
from ferrule.errors import RequestError, RequestFailed
from ferrule.interfaces.parsers import Reasoning
from ferrule.interfaces.router import Call
from ferrule.interfaces.service import Beam, Generate, Output, Service, Usage
from ferrule.types import FinishReason, SamplingParams, TokenLogprobs
from ferrule_plugins.router.openai_answers import (
    CompletionTokensDetails,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    UsageInfo,
)
from ferrule_plugins.router.openai_fields import Notes, refuse, review
from ferrule_plugins.router.openai_schema import GenerateBody

_logger = log.get("openai")

_SAMPLING = tuple(set(SamplingParams.__struct_fields__) & set(GenerateBody.__struct_fields__) - {"logit_bias"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_MAX_NOTE_BYTES = 16 << 10  # of each note
_NOTES = ("user", "metadata", "session_id", "safety_identifier")
_LOGGED = 1024  # characters of a note that the log repeats
_LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity


def check(body: GenerateBody, config: Config) -> None:
    """Refuse what this server cannot do. Ranges of sampling values are the service's to check."""
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise RequestError("stream_options needs stream to be true.", "stream_options")
    if body.prompt_logprobs is not None and stream:
        raise RequestError("prompt_logprobs cannot be streamed.", "prompt_logprobs")
    refuse(body)
    if body.priority and config.scheduler.scheduling_policy == "fcfs":
        raise RequestError("priority needs a server started with --scheduling-policy priority.", "priority")
    for name in _NOTES:
        if len(msgspec.json.encode(getattr(body, name, None))) > _MAX_NOTE_BYTES:
            raise RequestError(f"{name} is limited to {_MAX_NOTE_BYTES} bytes.", name)
    if body.request_id is not None and not _REQUEST_ID.match(body.request_id):
        raise RequestError("request_id must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", "request_id")


def sampling(body: GenerateBody, service: Service, given: dict[str, Any]) -> SamplingParams:
    """The request's values over the model's defaults over the documented ones. `given` wins over the body."""
    values = service.sampling_defaults()
    for name in _SAMPLING:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    if body.logit_bias is not None:
        values["logit_bias"] = _biases(body.logit_bias)
    return SamplingParams(**{**values, **given})


def _biases(raw: dict[str, float]) -> dict[int, float]:
    biases = {}
    for key, bias in raw.items():
        if not (key.removeprefix("-").isdecimal() and key.isascii() and len(key) <= 19):
            raise RequestError("logit_bias: keys must be token ids.", "logit_bias")
        biases[int(key)] = bias
    return biases


def processors(body: GenerateBody) -> tuple[dict[str, Any], ...]:
    """Logits processors, each by a qualified name or as {qualname, args, kwargs}."""
    return tuple({"qualname": item} if isinstance(item, str) else item for item in body.logits_processors or ())


def beam(body: GenerateBody) -> Beam | None:
    """Beam search, where it is asked for: `n` beams, or `best_of` beams of which the `n` best are returned."""
    if not body.use_beam_search:
        return None
    width = body.n if body.best_of is None else body.best_of
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return Beam(width=1 if width is None else width, length_penalty=penalty, early_stopping=bool(body.early_stopping))


@dataclass(frozen=True)
class Asked:
    """One request on its way: what its answers repeat, and how tokens are shown."""

    id: str
    created: int
    model: str
    fingerprint: str
    service: Service
    token_names: bool  # show tokens as token_id:N
    token_ids: bool  # return_token_ids
    cached_details: bool
    reasons: bool  # a reasoning parser runs
    num_per_prompt: int  # choices per prompt
    notes: Notes

    @classmethod
    def of(cls, prefix: str, call: Call, request: Generate, service: Service, config: Config) -> Asked:
        body: GenerateBody = call.body
        header = call.headers.get("x-request-id", "")
        name = body.request_id or (header if _REQUEST_ID.match(header) else call.request_id)
        front = config.frontend
        as_ids = body.return_tokens_as_token_ids
        _log_notes(f"{prefix}-{name}", body, config)
        return cls(
            id=f"{prefix}-{name}",
            created=int(time.time()),
            model=name_of(service, request.model),
            fingerprint=fingerprint(service),
            service=service,
            token_names=front.return_tokens_as_token_ids if as_ids is None else as_ids,
            token_ids=bool(body.return_token_ids),
            cached_details=front.enable_prompt_tokens_details,
            reasons=bool(front.reasoning_parser) and not request.raw,
            num_per_prompt=request.params.n,
            notes=review(body, call, config, service.template_reads),
        )

    def token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.token_names else self.service.token_text(token_id)

    def usage(self, usages: list[Usage], reasoning: list[int]) -> UsageInfo:
        """Sum over choices; a prompt counts once, however many choices it has."""
        firsts = usages[:: self.num_per_prompt]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        completion = sum(usage.completion_tokens for usage in usages)
        info = UsageInfo(prompt_tokens=prompt, total_tokens=prompt + completion, completion_tokens=completion)
        if self.cached_details:
            info.prompt_tokens_details = PromptTokensDetails(sum(usage.cached_tokens for usage in firsts))
        if self.reasons:
            info.completion_tokens_details = CompletionTokensDetails(sum(reasoning))
        return info

    def prompt_logprobs(self, entries: tuple[TokenLogprobs | None, ...]) -> PromptLogprobs:
        """By token id: the prompt's own token, then the most likely ones."""
        return [None if entry is None else self._ranked(entry) for entry in entries]

    def _ranked(self, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        ranked = {str(entry.token_id): PromptLogprob(finite(entry.logprob), entry.rank, self.token(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            ranked.setdefault(str(token_id), PromptLogprob(finite(logprob), rank, self.token(token_id)))
        return ranked


def name_of(service: Service, model: str | None) -> str:
    """What answers call the model: the first of its names, whichever was asked for."""
    name = service.resolve(model)
    return service.names[0] if name in service.names else name


def fingerprint(service: Service) -> str:
    """Changes with the version, the model and how it runs."""
    digest = hashlib.sha256(msgspec.json.encode(service.model)).hexdigest()[:10]
    return f"ferrule-{__version__}-{digest}"


def finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


def finish_of(output: Output) -> str | None:
    """The finish reason to show. Raises RequestFailed when the choice ended with an error of ours."""
    if output.finish is FinishReason.ERROR:
        raise RequestFailed(output.error or "The request failed.")
    return None if output.finish is None else output.finish.value


def _log_notes(answer_id: str, body: GenerateBody, config: Config) -> None:
    """`user`, `metadata` and the like change nothing: they are for whoever reads the log."""
    notes = {name: str(value)[:_LOGGED] for name in _NOTES if (value := getattr(body, name, None))}
    if notes and not config.frontend.disable_log_requests:
        _logger.info("request notes", id=answer_id, **notes)


class Meter:
    """Usage of all choices so far. `count` choices are expected.

    Tokens of reasoning are counted by the outputs that bring it: a token without text goes with the next one that has
    some, and where one output holds reasoning and content, its tokens are shared by their number of characters.
    """

    def __init__(self, asked: Asked, count: int) -> None:
        self._asked = asked
        self._usages = [Usage()] * count
        self._reasoning = [0] * count
        self._undecided = [0] * count  # tokens that no text came from yet

    def see(self, output: Output) -> None:
        index = output.index
        self._usages[index] = output.usage
        self._undecided[index] += len(output.token_ids)
        if output.events and self._asked.reasons:
            thoughts = sum(len(event.text) for event in output.events if isinstance(event, Reasoning))
            texts = sum(len(getattr(event, "text", "") or getattr(event, "fragment", "")) for event in output.events)
            self._reasoning[index] += round(self._undecided[index] * thoughts / max(1, texts))
            self._undecided[index] = 0

    def of(self, index: int) -> UsageInfo:
        """One choice's, for streams that ask for usage in each chunk."""
        usage = self._usages[index]
        total = usage.prompt_tokens + usage.completion_tokens
        return UsageInfo(
            prompt_tokens=usage.prompt_tokens, total_tokens=total, completion_tokens=usage.completion_tokens
        )

    def total(self) -> UsageInfo:
        return self._asked.usage(self._usages, self._reasoning)
