"""What the engine knows of one request: counters that only grow within a life, and what follows from them.

A life begins when a request takes a slot and ends when it is preempted or done; its number is the `epoch`. Within
it, always: confirmed <= sent <= known <= limit, and confirmed <= len(ids) <= known.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from ferrule.engine.hashing import HashChain, root_digest
from ferrule.engine.snapshots import NOWHERE, Borders
from ferrule.interfaces.scheduler import RequestView
from ferrule.types import (
    Admit,
    Chunk,
    EngineRequest,
    FinishReason,
    Guesses,
    MediaItem,
    RequestDelta,
    RequestTimes,
    RowResult,
    StepSeconds,
    TokenLogprobs,
)

MAX_PREEMPTIONS = 8  # a request that was preempted this often runs alone, and so is never preempted again


@dataclass(slots=True)
class Luck:
    """A record of guesses for a request. The two counts fade; `resume` is a number of known tokens."""

    right: float = 0.0
    tried: float = 0.0  # guesses up to the first wrong one
    empty: int = 0  # times that guesses were asked for and none came, since some last came
    patience: int = 4  # tokens without guesses, when they next do not pay
    resume: int = 0  # from then on guesses are asked for again


@dataclass(slots=True, eq=False)
class Request:
    """`ids` are the tokens that the host has seen: the prompt and every sample that was committed.

    known      tokens that exist, samples in flight included
    sent       positions [0, sent) are in the cache once all plans in flight have run
    confirmed  positions [0, confirmed) are in the cache: their plans were committed
    certain    positions [0, certain) are in recurrent states that the next chunk may begin with; a wrong guess behind
               them is not undone
    limit      the most tokens that it may ever have; the last of them is never computed
    guesses    of what follows the last id; no other counter takes them in before a result says which are right
    """

    spec: EngineRequest
    sequence: int
    limit: int
    chain: HashChain | None
    id: str = field(init=False)
    ids: array[int] = field(init=False)  # not a list: the garbage collector would visit each token
    num_prompt: int = field(init=False)
    min_length: int = field(init=False)
    stops: frozenset[int] = field(init=False)
    ends: Literal["sample", "pool"] = field(init=False)  # what becomes of the last position that is known
    known: int = field(init=False)
    sent: int = 0
    prefill: int = 0  # tokens that were known when this life began, up to the last border at which it stops
    confirmed: int = 0
    certain: int = 0
    epoch: int = 0  # 0: not alive; lives count from 1 over all requests
    slot: int = -1
    media: tuple[MediaItem, ...] = ()  # under digests that adapter and salt are part of
    guesses: tuple[int, ...] = ()
    luck: Luck = field(default_factory=Luck)
    guessed: Guesses | None = None  # of all lives; None: nothing was
    found: int = -1  # tokens that were in the cache when this was last asked before a life; -1: not asked
    cached: int = -1  # prompt tokens found in the cache when it first ran; -1: it never ran
    borders: Borders = NOWHERE  # of this life, or of the one that could begin now
    charged: int = 0  # tokens that count as computed for its key
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # delivered: those of positions 1 to this one
    scheduled: float = 0.0
    first_token: float = 0.0
    seconds: StepSeconds | None = None  # of its steps, where they are measured

    def __post_init__(self) -> None:
        spec = self.spec
        self.id = spec.id
        self.ids = array("q", spec.prompt_ids)
        self.num_prompt = self.known = len(self.ids)
        self.min_length = self.num_prompt + spec.work.min_tokens
        self.stops = frozenset(spec.work.stop_token_ids)
        self.ends = spec.work.ends
        adapter = None if spec.adapter is None else spec.adapter.name
        self.media = tuple(
            replace(item, digest=root_digest(item.digest, item.kind, adapter, spec.cache_salt)) for item in spec.media
        )

    @property
    def running(self) -> bool:
        return self.slot >= 0

    @property
    def todo(self) -> int:
        """Tokens that a plan may still compute; 0 when the last sample is in flight."""
        return self.known - self.sent if self.known < self.limit else 0

    @property
    def done(self) -> int:
        """Tokens that need not be computed: while it waits, those found in the cache."""
        return self.sent if self.running else max(0, self.found)

    @property
    def left(self) -> int:
        """Tokens to compute before it samples."""
        return self.known - self.done

    @property
    def prefilling(self) -> bool:
        """True while it runs and what was known when this life began was not all sent."""
        return self.slot >= 0 and self.sent < self.prefill

    @property
    def exclusive(self) -> bool:
        return self.num_preemptions >= MAX_PREEMPTIONS

    @property
    def reads_cache(self) -> bool:
        """False while logprobs of the prompt are owed: they come only from computing it."""
        return self.spec.work.prompt_logprobs is None or self.num_prompt_logprobs == self.num_prompt - 1

    def begin(self, slot: int, epoch: int, cached: int, now: float) -> None:
        """Take a slot with `cached` tokens already in the cache."""
        self.slot = slot
        self.epoch = epoch
        self.sent = self.confirmed = self.certain = cached
        self.prefill = self.borders.whole(self.known)
        if self.cached < 0:
            self.cached = cached
            self.scheduled = now

    def retreat(self) -> None:
        """End this life. Results in flight will be dropped; the next life draws the same samples again."""
        self.slot = -1
        self.epoch = 0
        self.found = -1
        self.known = len(self.ids)
        self.sent = self.confirmed = 0
        self.guesses = ()

    def settle(self, drafts: int, right: int) -> None:
        """Take back the guesses of a confirmed chunk that were wrong, and count those that were right."""
        self.confirmed -= drafts - right
        self.sent += right
        self.known += right
        if right == drafts:
            self.certain = self.confirmed

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
        """Select the prompt logprobs, for positions from `start` + 1 on, that no earlier life has delivered."""
        fresh = entries[max(0, self.num_prompt_logprobs - start) :]
        self.num_prompt_logprobs += len(fresh)
        return fresh

    def admit(self, snapshot: int) -> Admit:
        """Return what the runner must know when this life begins, with the states of `snapshot`."""
        spec = self.spec
        return Admit(
            slot=self.slot,
            id=self.id,
            epoch=self.epoch,
            known_ids=tuple(self.ids),
            num_prompt=self.num_prompt,
            work=spec.work,
            adapter_slot=spec.adapter_slot,
            media=tuple(replace(item, data={}) for item in self.media),
            grammar=spec.grammar,
            restore=snapshot,
            scope=root_digest(b"", None if spec.adapter is None else spec.adapter.name, spec.cache_salt),
        )

    def chunk(
        self, start: int, count: int, ends: bool, blocks: tuple[tuple[int, ...], ...], save: int, wanted: int
    ) -> Chunk:
        """Make a row of a step; states go to the snapshot `save`. A row that `ends` the known tokens has the guesses
        behind it, and `wanted` others may come with its result.
        """
        drafts = len(self.guesses)
        if not drafts:
            self.certain = start + count
        return Chunk(
            slot=self.slot,
            id=self.id,
            epoch=self.epoch,
            start=start,
            count=count + drafts,
            ends=self.ends if ends else "",
            new_ids=self.guesses,
            drafts=drafts,
            wanted=wanted,
            new_blocks=blocks,
            save=save,
        )

    def delta(
        self, row: RowResult, count: int, stop: int | None, prompt_logprobs: tuple[TokenLogprobs, ...]
    ) -> RequestDelta:
        """Make the delta of the first `count` tokens of a row. `stop` is the stop token that ended it."""
        return RequestDelta(
            id=self.id,
            token_ids=row.token_ids[:count],
            logprobs=row.logprobs[:count],
            prompt_logprobs=prompt_logprobs,
            stop_reason=stop,
            cached=self.cached,
            guesses=self.guessed,
        )

    def last_delta(self, delta: RequestDelta, finish: FinishReason, now: float) -> RequestDelta:
        """Make the terminal delta of `delta`."""
        times = RequestTimes(self.spec.arrival, self.scheduled, self.first_token, now, self.seconds)
        cached, count = max(0, self.cached), self.num_preemptions
        return replace(delta, finish=finish, cached=cached, num_preemptions=count, times=times, guesses=self.guessed)

    def view(self, served: float = 0.0) -> RequestView:
        """Return what a policy sees. `served` is what the request's key has used: see `RequestView.key_served`."""
        return RequestView(
            id=self.id,
            arrival=self.spec.arrival,
            sequence=self.sequence,
            priority=self.spec.priority,
            num_prompt=self.num_prompt,
            num_known=self.known,
            num_computed=self.sent,
            num_preemptions=self.num_preemptions,
            key_name=self.spec.key_name,
            key_served=served,
        )

    def check(self, depth: int) -> None:
        """Raise AssertionError unless the counters are in order and no more than `depth` samples are in flight."""
        if not 0 <= self.confirmed <= self.sent <= self.known <= self.limit:
            raise AssertionError(f"I7: counters of {self.id} are out of order")
        if not self.confirmed <= len(self.ids) <= self.known <= len(self.ids) + depth:
            raise AssertionError(f"I7: {self.id} counts tokens that are not there")
