"""What `LLM.generate` and `LLM.chat` return, with the documented attribute names."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Logprob(Struct, frozen=True):
    """One token's log-probability at a position; `rank` 1 is the most likely. None: not among the ranked ones."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]  # token id → its log-probability


class CompletionOutput(Struct, frozen=True, kw_only=True):
    """One choice."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput(Struct, frozen=True, kw_only=True):
    """One prompt with its choices. `prompt` is None when ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0
