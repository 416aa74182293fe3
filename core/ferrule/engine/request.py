"""What the engine knows of one request: counters that only grow within a life, and what follows from them.

A life begins when a request takes a slot and ends when it is preempted or done; its number is the `epoch`. Within
it, always: confirmed <= sent <= known <= limit, and confirmed <= len(ids) <= known.
"""

from __future__ import annotations

from ferrule.engine.hashing import HashChain
from ferrule.interfaces.scheduler import RequestView
from ferrule.types import Admit, EngineRequest, FinishReason, RequestDelta, RequestTimes, TokenLogprobs

MAX_PREEMPTIONS = 8  # a request that was preempted this often runs alone, and so is never preempted again


class Request:
    """`ids` are the tokens that the host has seen: the prompt and every sample that was committed.

    known      tokens that exist, samples in flight included
    sent       positions [0, sent) are in the cache once all plans in flight have run
    confirmed  positions [0, confirmed) are in the cache: their plans were committed
    limit      the most tokens that it may ever have; the last of them is never computed
    """

    __slots__ = (
        "cached",
        "chain",
        "confirmed",
        "epoch",
        "first_token",
        "id",
        "ids",
        "known",
        "limit",
        "min_length",
        "num_preemptions",
        "num_prompt",
        "num_prompt_logprobs",
        "scheduled",
        "sent",
        "sequence",
        "slot",
        "spec",
        "stops",
    )

    def __init__(self, spec: EngineRequest, sequence: int, limit: int, chain: HashChain | None) -> None:
        self.spec = spec
        self.id = spec.id
        self.sequence = sequence
        self.limit = limit
        self.chain = chain
        self.ids = list(spec.prompt_ids)
        self.num_prompt = len(self.ids)
        self.min_length = self.num_prompt + spec.sampling.min_tokens
        self.stops = frozenset(spec.sampling.stop_token_ids)
        self.known = self.num_prompt
        self.sent = 0
        self.confirmed = 0
        self.epoch = 0  # 0: not alive; lives count from 1 over all requests
        self.slot = -1
        self.cached = -1  # prompt tokens found in the cache when it first ran; -1: it never ran
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0  # delivered: those of positions 1 to this one
        self.scheduled = 0.0
        self.first_token = 0.0

    @property
    def running(self) -> bool:
        return self.slot >= 0

    @property
    def todo(self) -> int:
        """Tokens that a plan may still compute; 0 when the last sample is in flight."""
        return self.known - self.sent if self.known < self.limit else 0

    @property
    def exclusive(self) -> bool:
        return self.num_preemptions >= MAX_PREEMPTIONS

    @property
    def reads_cache(self) -> bool:
        """False while logprobs of the prompt are owed: they come only from computing it."""
        return self.spec.sampling.prompt_logprobs is None or self.num_prompt_logprobs == self.num_prompt - 1

    def begin(self, slot: int, epoch: int, cached: int, now: float) -> None:
        """Take a slot with `cached` tokens already in the cache."""
        self.slot = slot
        self.epoch = epoch
        self.sent = self.confirmed = cached
        if self.cached < 0:
            self.cached = cached
            self.scheduled = now

    def retreat(self) -> None:
        """End this life. What is in flight belongs to nobody; samples will be repeated, the same ones."""
        self.slot = -1
        self.epoch = 0
        self.known = len(self.ids)
        self.sent = self.confirmed = 0

    def append(self, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None, int | None]:
        """Take sampled tokens up to the one that ends the request, if one does.

        Returns how many were taken, and why the request ends with the stop token, if it does.
        """
        for count, token in enumerate(token_ids, 1):
            self.ids.append(token)
            length = len(self.ids)
            if token in self.stops and length > self.min_length:
                return count, FinishReason.STOP, token
            if length >= self.limit:
                return count, FinishReason.LENGTH, None
        return len(token_ids), None, None

    def undelivered(self, start: int, entries: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
        """Of prompt logprobs for positions from `start` + 1 on, those that no earlier life has delivered."""
        fresh = entries[max(0, self.num_prompt_logprobs - start) :]
        self.num_prompt_logprobs += len(fresh)
        return fresh

    def admit(self) -> Admit:
        """What the runner must know when this life begins."""
        spec = self.spec
        return Admit(self.slot, self.id, self.epoch, tuple(self.ids), self.num_prompt, spec.sampling, spec.adapter)

    def last_delta(self, delta: RequestDelta, finish: FinishReason, now: float) -> RequestDelta:
        """`delta` as the terminal one."""
        return RequestDelta(
            delta.id,
            delta.token_ids,
            delta.logprobs,
            delta.prompt_logprobs,
            finish,
            delta.stop_reason,
            max(0, self.cached),
            self.num_preemptions,
            delta.error,
            RequestTimes(self.spec.arrival, self.scheduled, self.first_token, now),
        )

    def view(self) -> RequestView:
        return RequestView(
            self.id,
            self.spec.arrival,
            self.sequence,
            self.spec.priority,
            self.num_prompt,
            self.known,
            self.sent,
            self.num_preemptions,
        )

    def check(self, depth: int) -> None:
        """Raise AssertionError unless the counters are in order and no more than `depth` samples are in flight."""
        if not 0 <= self.confirmed <= self.sent <= self.known <= self.limit:
            raise AssertionError(f"I7: counters of {self.id} are out of order")
        if not self.confirmed <= len(self.ids) <= self.known <= len(self.ids) + depth:
            raise AssertionError(f"I7: {self.id} counts tokens that are not there")
