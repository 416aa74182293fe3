"""`scheduler` and `policy`: who runs next. No torch, clock, socket or environment: `now` is passed in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrule.types import (
    CacheGroup,
    EngineRequest,
    EngineStats,
    FinishReason,
    PromptBorder,
    RequestDelta,
    StepPlan,
    StepResult,
    Targets,
)

if TYPE_CHECKING:
    from ferrule.interfaces.plugins import Plugins


@dataclass(frozen=True, kw_only=True)
class GuessLimits:
    """The guesses of next tokens that a scheduler may ask a speculator for (`Chunk.wanted`)."""

    most: int = 0  # for a request in a step; 0: there is no speculator
    max_len: int = 0  # nothing is guessed for a request with more tokens; 0: any number
    max_requests: int = 0  # nothing is guessed while more requests than that run and wait; 0: any number
    adaptive: bool = True  # fewer where guesses cost more than they bring
    lookahead: int = 0  # positions behind a row's end that a speculator writes to, where there are blocks for them


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """The scheduler's section of the configuration plus what the device allows."""

    groups: tuple[CacheGroup, ...]
    num_blocks: int  # the null block included
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    depth: int = 1
    chunked_prefill: bool = True
    prefix_caching: bool = True
    hash_algo: str = "sha256"
    long_prefill_token_threshold: int = 0  # longest piece of a prompt; longer prompts are long; 0: max_model_len / 25
    max_num_partial_prefills: int = 1  # prompts in progress: begun, not ended, and not waiting for one that passed them
    max_long_partial_prefills: int = 1  # of them, long ones
    prompt_share: int = 0  # a platform's first guess of what prompts cost; 0: a step gives them all of its budget
    targets: Targets = Targets()  # of requests that have none of their own
    prompt_border: PromptBorder | None = None
    encode_budget: int = 0  # tokens of media that a step encodes; 0: `max_num_batched_tokens`
    encoded_tokens: int = 0  # of media whose embeddings are kept; 0: as many as a step or a request may have
    num_snapshots: int = 0  # states of recurrent groups that can be saved; 0: their prefixes are not reused
    adapter_slots: int = 0  # adapters that can be loaded at a time, by the loop
    guesses: GuessLimits = GuessLimits()
    cache_root: bytes = b""  # random, so that digests of cached prefixes cannot be computed outside


@dataclass(frozen=True, kw_only=True)
class RequestView:
    """The facts about a request that a policy may look at."""

    id: str
    arrival: float
    sequence: int  # admission order, unique
    priority: int
    num_prompt: int
    num_known: int
    num_computed: int
    num_preemptions: int
    key_name: str = ""  # of the API key that the request came with
    key_served: float = 0.0  # with `by_key`: tokens computed for this key, with those of its requests that wait ahead


class SchedulingPolicy(ABC):
    """An order of requests. It is pure: the same views give the same answers.

    A key is taken when a request begins to wait, and again every `refresh_seconds` if that is set: it costs O(waiting),
    so a policy whose order does not change with time leaves it None.
    """

    refresh_seconds: float | None = None
    by_key = False  # True: views tell what each API key has used, which the scheduler then counts

    @abstractmethod
    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        """Sort key among waiting requests; the lowest runs first. Equal keys: in order of admission."""

    @abstractmethod
    def victim(self, running: Sequence[RequestView]) -> str:
        """Choose the id to preempt when the cache is full. `running` is not empty, and never has the oldest request."""

    def budget(self, running: int, waiting: int, limit: int) -> int:
        """Return how many tokens to give to this step, from 1 to `limit`. Not asked where prompts must go whole."""
        return limit


class Scheduler(ABC):
    """A planner of steps, which credits their results.

    Up to `limits.depth` plans may be in flight; commits come in order. Seven methods must be written. The three others,
    which concern what is cached and whose output is not read, have a default that is safe for any scheduler.
    """

    own_order = False  # True: requests are not admitted in the order of the policy's keys

    def __init__(self, limits: SchedulerLimits, policy: SchedulingPolicy, plugins: Plugins | None = None) -> None:
        """Keep limits and policy. `plugins`, which the engine always gives, is for a scheduler that leaves work to
        another one.
        """
        self.limits = limits
        self.policy = policy

    @abstractmethod
    def add(self, request: EngineRequest, now: float) -> None:
        """Queue an admitted request. An id that is already here is a ValueError."""

    @abstractmethod
    def cancel(self, ids: Sequence[str], reason: FinishReason, now: float) -> list[RequestDelta]:
        """End requests wherever they are; unknown ids are ignored. Returns their terminal deltas."""

    @abstractmethod
    def schedule(self, now: float) -> StepPlan | None:
        """Plan a step, or None when nothing can run before a result is committed."""

    @abstractmethod
    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestDelta]:
        """Credit a result to the lives of requests that it belongs to. Late results are dropped by epoch."""

    @abstractmethod
    def has_work(self) -> bool:
        """Return whether a request is waiting or running, and is not paused."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return gauges and counters."""

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError naming the invariant that does not hold."""

    def pause(self, id: str, paused: bool, now: float) -> None:
        """Give a request no steps until it is called with `paused` False; unknown ids are ignored.

        A paused request is not work: `has_work` does not count it. It may be cancelled. By default requests are never
        paused, and the output that a client does not read is not bounded.
        """

    def reset_cache(self) -> bool:
        """Forget reusable prefixes; False when live requests hold some of them (those stay)."""
        return False

    def evacuate(self, now: float) -> bool:
        """Take back to the queue all that runs, and forget all prefixes: what the cache holds is about to be lost.

        Called with no plan in flight. False, with nothing changed, when this scheduler cannot.
        """
        return not self.has_work() and self.reset_cache()
