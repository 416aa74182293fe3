"""`DefaultScheduler`: continuous batching from one rule.

A request has tokens that are known and tokens that were sent to be computed; a step gives it part of the difference.
Chunked prefill, prefix hits, decoding ahead of the results, and recompute after preemption are cases of that rule.

Blocks are released as soon as the host decides so, although plans that use them may be in flight: plans run in
order, so a later plan cannot spoil an earlier one. Results of a life that has ended carry its epoch and are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ferrule.engine.cache import BlockDelta, KVCacheManager, PrefixHit, footprint
from ferrule.engine.encodings import Encodings
from ferrule.engine.guesses import Guesses
from ferrule.engine.prefills import Prefills, PromptOrder
from ferrule.engine.queue import WaitingQueue
from ferrule.engine.request import Request
from ferrule.engine.shares import Shares
from ferrule.engine.stats import Counters
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.scheduler import Scheduler, SchedulerLimits, SchedulingPolicy
from ferrule.types import (
    Admit,
    Chunk,
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestDelta,
    RowResult,
    StepPlan,
    StepResult,
)


@dataclass(slots=True)
class Draft:
    """The plan that is being made."""

    budget: int  # tokens that may still be added
    most_per_prompt: int = 0  # tokens that one prompt may have
    chunks: dict[str, Chunk] = field(default_factory=dict)
    admits: list[Admit] = field(default_factory=list)
    blocks_owed: int = 0  # to prompts that run, until they are computed: nobody is admitted into these
    preempted: bool = False

    @property
    def prompt_budget(self) -> int:
        """Tokens that may still be added for one prompt."""
        return min(self.budget, self.most_per_prompt)

    def plan(self, step: int, releases: tuple[int, ...], **media: Any) -> StepPlan:
        chunks, admits = tuple(self.chunks.values()), tuple(self.admits)
        return StepPlan(step=step, chunks=chunks, admits=admits, releases=releases, **media)

    def drop(self, id: str) -> None:
        """Take back what a victim was given in this step."""
        chunk = self.chunks.pop(id, None)
        if chunk is not None:
            self.budget += chunk.count
        self.preempted = True


class Slots:
    """The slots of the runner: those that are free, and those that the next plan says to give back."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count - 1, -1, -1))
        self.releases: list[int] = []
        self._count = count

    def release(self, slot: int) -> None:
        self.free.append(slot)
        self.releases.append(slot)

    def take_releases(self) -> tuple[int, ...]:
        found = tuple(self.releases)
        self.releases.clear()
        return found

    def check(self, taken: Iterable[int]) -> None:
        """Raise AssertionError unless every slot is free or has one owner."""
        slots = sorted([*self.free, *taken])
        if slots != list(range(self._count)):
            raise AssertionError(f"I9: slots are lost, or have two owners: {slots}")


class DefaultScheduler(Scheduler):
    """The default scheduler: running requests first, decoding ones before prefilling ones, then the waiting queue.

    The head of the queue is admitted when blocks for all of its known tokens are there, else nothing is: no request
    that waits overtakes another. When blocks run out, the policy names a victim among those that run; never the oldest
    of them, so that one always gets on, and never one whose last token is already on its way.
    """

    def __init__(self, limits: SchedulerLimits, policy: SchedulingPolicy, plugins: Plugins | None = None) -> None:
        super().__init__(limits, policy, plugins)
        self.cache = KVCacheManager(limits)
        self.encodings = Encodings(limits)
        self.waiting = WaitingQueue(policy)
        self.running: dict[str, Request] = {}  # in order of admission
        self.counters = Counters()
        self._prefills = Prefills(limits, self.encodings)
        self._guesses = Guesses(limits.guesses, recurrent=any(not group.paged for group in limits.groups))
        self._requests: dict[str, Request] = {}
        self._slots = Slots(limits.max_num_seqs)
        self._sequence = self._epoch = self._step = 0

    # ------------------------------------------------------------------------------------ requests

    def add(self, request: EngineRequest, now: float) -> None:
        """Queue an admitted request. Raises ValueError when it is here already or can never run."""
        if request.id in self._requests:
            raise ValueError("a request with this id is already here")
        limit = _longest(request, self.limits)
        self.encodings.admit(request.media)
        self._sequence += 1
        entry = Request(request, self._sequence, limit, self.cache.chain(request))
        self.waiting.shares.enter(request.key_name)
        self.waiting.push(entry, now)
        self._requests[request.id] = entry

    def cancel(self, ids: Sequence[str], reason: FinishReason, now: float) -> list[RequestDelta]:
        found = [self._requests[id] for id in dict.fromkeys(ids) if id in self._requests]
        return [self._end(request, RequestDelta(id=request.id), reason, now) for request in found]

    def pause(self, id: str, paused: bool, now: float) -> None:
        if not paused:
            self.waiting.resume(id, now)
        elif request := self._requests.get(id):
            if request.running:
                self._retreat(request, now)
            self.waiting.pause(request)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # ------------------------------------------------------------------------------------ planning

    def schedule(self, now: float) -> StepPlan | None:
        if any(self._guesses.wait(request) for request in self.running.values()):
            return None
        draft = Draft(_budget(self.limits, self.policy, len(self.running), len(self.waiting)))
        self._guesses.begin(draft.budget, len(self.running), len(self.waiting))
        self.encodings.begin()
        self._continue_running(draft, now)
        if not draft.preempted:
            self.waiting.refresh(now)
            while self._admit_next(draft, now):
                pass
        if not draft.chunks:
            return None
        self._step += 1
        plan = draft.plan(self._step, self._slots.take_releases(), **self.encodings.take())
        self._prefills.pace.begin(plan, now)
        return plan

    def _continue_running(self, draft: Draft, now: float) -> None:
        """Add the requests that decode, then the prompts in progress, behind the waiting ones that may pass them."""
        begun = []
        for request in list(self.running.values()):
            todo = request.todo
            if todo > 1:
                begun.append(request)
            elif todo and draft.budget and request.running:
                self._give(request, 1, draft, now)
        free_slots = 0 if draft.preempted else len(self._slots.free)
        order = self._prefills.order(begun, self.waiting, free_slots, self.cache, now)
        decoding = (self.running[id] for id in draft.chunks)
        draft.budget = self._prefills.pace.tokens(decoding, order.prompts, draft.budget, now)
        draft.most_per_prompt = self._prefills.share(order.in_progress, self.waiting, draft.budget)
        self._admit_passing(order, draft, now)
        for request in self._prefills.turns(order.in_progress, [self.running[admit.id] for admit in draft.admits]):
            if request.running and (count := self._prefills.piece(request, request.sent, draft.prompt_budget)):
                self._give(request, count, draft, now)
        draft.blocks_owed += _blocks_owed(self.cache, order.in_progress)

    def _admit_passing(self, order: PromptOrder, draft: Draft, now: float) -> None:
        """Admit waiting prompts before those in progress, into blocks that the latter do not need."""
        promised = _blocks_owed(self.cache, order.in_progress)
        draft.blocks_owed += promised
        for _ in order.passing:
            if not self._admit_next(draft, now, passes=True):
                break
        draft.blocks_owed -= promised

    def _give(self, request: Request, count: int, draft: Draft, now: float) -> None:
        """Add a row for a running request, if blocks can be had."""
        end = request.sent + count
        if request.media and self.encodings.reach(request, request.sent, count) < count:
            return
        if request.guesses:
            end += self._guesses.choose(request, self.cache.room(request.id))
        ahead = self._guesses.lookahead(request, end)
        while (blocks := self.cache.reserve(request.id, end, ahead=ahead)) is None:
            victim = self._victim()
            if victim is None:
                return
            self._preempt(victim, draft, now)
            if victim is request:
                return
        self._send(request, count, blocks, draft)

    def _send(self, request: Request, count: int, blocks: BlockDelta, draft: Draft) -> None:
        start = request.sent
        request.sent = end = start + count
        ends = end == request.known
        if ends:
            request.known += 1
        save = self.cache.save(request.id, request.ids, end) if request.borders.save(end) else 0
        wanted = self._guesses.wanted(request) if ends and request.ends == "sample" else 0
        draft.chunks[request.id] = chunk = request.chunk(start, count, ends, blocks, save, wanted)
        draft.budget -= chunk.count
        if request.media:
            self.encodings.send(request, start, end)

    def _admit_next(self, draft: Draft, now: float, passes: bool = False) -> bool:
        """Admit the request whose turn it is, with its first tokens; return False when there is none or it must wait.

        One that `passes` the prompt in progress was chosen for what is cached of it, and does so only with that.
        """
        room = draft.budget and self._slots.free
        request = self._prefills.next(self.running.values(), self.waiting, now) if room else None
        if request is None:
            return False
        hit = self.cache.match(request.chain, request.ids, request.reads_cache)
        passes = passes and hit.tokens >= request.found
        request.borders, request.found = hit.borders, hit.tokens
        count = self._prefills.first_piece(request, draft.prompt_budget, self.running.values(), passes)
        fits = count and self.cache.room_for(request.known, hit, draft.blocks_owed)
        end = hit.tokens + count
        ahead = self._guesses.lookahead(request, end)
        blocks = self.cache.reserve(request.id, end, hit, request.chain, ahead) if fits else None
        if blocks is None:
            return False
        self._begin(request, hit, draft, now)
        self._send(request, count, blocks, draft)
        draft.blocks_owed += self.cache.owed(request.id, request.known)
        return True

    def _begin(self, request: Request, hit: PrefixHit, draft: Draft, now: float) -> None:
        """Give a waiting request a slot, and a life that begins with what was found in the cache."""
        self.waiting.remove(request)
        self.counters.count_lookup(request)
        self._epoch += 1
        request.begin(self._slots.free.pop(), self._epoch, hit.tokens, now)
        self.running[request.id] = request
        draft.admits.append(request.admit(hit.snapshot))

    def _victim(self) -> Request | None:
        """Choose the request to preempt, the one that asks for blocks included."""
        return _choose_victim(self.running, self.policy, self.waiting.shares)

    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        draft.drop(request.id)
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self._retreat(request, now)

    def _retreat(self, request: Request, now: float) -> None:
        self._vacate(request)
        request.retreat()
        self.waiting.push(request, now)

    def _vacate(self, request: Request) -> None:
        """Take a running request's blocks and slot. The slot may be reused at once: plans release before they admit."""
        del self.running[request.id]
        self.cache.release(request.id)
        self.encodings.release(request.id)
        self._slots.release(request.slot)

    # ------------------------------------------------------------------------------------ results

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestDelta]:
        pace = self._prefills.pace
        self._guesses.end(plan, result, pace.end(plan, now), pace.costs)
        deltas = []
        for chunk, row in zip(plan.chunks, result.rows, strict=True):
            request = self._requests.get(chunk.id)
            if request is None or request.epoch != row.epoch:
                continue
            request.seconds = result.seconds and result.seconds + request.seconds
            if (delta := self._credit(request, chunk, row, now)) is not None:
                deltas.append(delta)
        self.counters.steps += 1
        return deltas

    def _credit(self, request: Request, chunk: Chunk, row: RowResult, now: float) -> RequestDelta | None:
        error, told, vector, ends = row.error, len(row.token_ids), row.vector, chunk.ends
        if error is None and (told != 1 or ends != "sample" or vector is not None):
            error = _not_asked(chunk, row)
        if error is not None:
            self.counters.corrupted_requests += not row.invalid
            failed = RequestDelta(id=request.id, error=error, invalid=row.invalid)
            return self._end(request, failed, FinishReason.ERROR, now)
        request.confirmed = chunk.start + chunk.count
        self._guesses.credit(request, chunk, row)
        self.counters.count_guesses(request, chunk, told - 1)
        self.waiting.shares.charge(request)
        prompt_logprobs = request.undelivered(chunk.start, row.prompt_logprobs) if row.prompt_logprobs else ()
        if not ends:
            self.cache.confirm(request.id, request.ids, request.confirmed)
            return RequestDelta(id=request.id, prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
        if len(request.ids) == request.num_prompt:
            request.first_token = now
            self.counters.count_prompt(request)
        if vector is not None:
            self.cache.confirm(request.id, request.ids, request.confirmed)
            return self._end(request, RequestDelta(id=request.id, vector=vector), FinishReason.STOP, now)
        count, finish, stop = request.append(row.token_ids)
        self.cache.confirm(request.id, request.ids, min(request.confirmed, len(request.ids)))
        self.counters.generation_tokens += count
        delta = request.delta(row, count, stop, prompt_logprobs)
        return delta if finish is None else self._end(request, delta, finish, now)

    def _end(self, request: Request, delta: RequestDelta, finish: FinishReason, now: float) -> RequestDelta:
        """Forget a request wherever it is; `delta` becomes its last one."""
        if request.running:
            self._vacate(request)
        else:
            self.waiting.remove(request)
        del self._requests[request.id]
        self.waiting.shares.leave(request.spec.key_name)
        return request.last_delta(delta, finish, now)

    # ------------------------------------------------------------------------------------ care

    def stats(self) -> EngineStats:
        paused, found = len(self.waiting.paused), {**self.cache.usage(), **vars(self.counters), **_adapters(self)}
        return EngineStats(running=len(self.running), waiting=len(self.waiting) + paused, paused=paused, **found)

    def reset_cache(self) -> bool:
        return self.cache.reset()

    def evacuate(self, now: float) -> bool:
        """Put all running requests back, which is not counted as preemption. The runner forgets its slots by itself."""
        for request in list(self.running.values()):
            self._retreat(request, now)
        self._slots.take_releases()
        self.encodings.forget()
        return self.cache.reset()

    def check(self) -> None:
        self.cache.check(frozenset(self.running))
        self.encodings.check(frozenset(self.running))
        self.waiting.check()
        if len(self.running) + len(self.waiting) + len(self.waiting.paused) != len(self._requests):
            raise AssertionError("I4: a request neither runs nor waits")
        self._slots.check(request.slot for request in self.running.values())
        for request in self._requests.values():
            request.check(self.limits.depth)


def _adapters(scheduler: DefaultScheduler) -> dict[str, Any]:
    """Return the titles of the adapters that requests are computed with, or are to be, as fields of `EngineStats`."""
    if not scheduler.limits.adapter_slots:
        return {}
    waiting = scheduler.waiting
    found = {"running_adapters": scheduler.running.values(), "waiting_adapters": (*waiting, *waiting.paused.values())}
    return {
        field: tuple(dict.fromkeys(one.spec.adapter.title for one in requests if one.spec.adapter is not None))
        for field, requests in found.items()
    }


def _budget(limits: SchedulerLimits, policy: SchedulingPolicy, running: int, waiting: int) -> int:
    most = limits.max_num_batched_tokens
    return max(1, min(most, policy.budget(running, waiting, most))) if limits.chunked_prefill else most


def _blocks_owed(cache: KVCacheManager, prompts: Iterable[Request]) -> int:
    return sum(cache.owed(request.id, request.known) for request in prompts if request.running)


def _choose_victim(running: Mapping[str, Request], policy: SchedulingPolicy, shares: Shares) -> Request | None:
    oldest = min(running.values(), key=lambda request: request.sequence)
    others = [request for request in running.values() if request.todo and request is not oldest]
    candidates = [request.view(shares.served(request.spec.key_name)) for request in others]
    if not candidates:
        return None
    id = policy.victim(candidates)
    if all(view.id != id for view in candidates):
        raise ValueError(f"{type(policy).__name__}.victim named a request that is not a candidate")
    return running[id]


def _not_asked(chunk: Chunk, row: RowResult) -> str | None:
    """Say what is wrong with what a row ends with, or return None when its chunk was to end with that."""
    samples, pools = chunk.ends == "sample", chunk.ends == "pool"
    if samples <= len(row.token_ids) <= samples * (1 + chunk.drafts) and pools == (row.vector is not None):
        return None
    return "the runner did not return the tokens, or the vector, that it was asked for"


def _longest(request: EngineRequest, limits: SchedulerLimits) -> int:
    """Return the most tokens that the request may ever have. Raises ValueError when it can never run."""
    most = limits.max_model_len + (request.work.ends == "pool")  # a vector has no position
    limit = min(len(request.prompt_ids) + request.work.max_tokens, most)
    if not 0 < len(request.prompt_ids) < limit:
        raise ValueError(f"a prompt of {len(request.prompt_ids)} tokens leaves nothing to do within {limit}")
    if footprint(limits, limit - 1) > limits.num_blocks - 1:
        raise ValueError(f"{limit} tokens do not fit the KV cache, which has {limits.num_blocks - 1} blocks")
    if not limits.chunked_prefill and limit - 1 > limits.max_num_batched_tokens:
        raise ValueError(f"{limit} tokens do not fit one step, and chunked prefill is off")
    return limit
