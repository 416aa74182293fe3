"""Planted bugs in lives, budgets, order, and what is told about a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ferrule.engine.cache import RequestBlocks, footprint
from ferrule.engine.prefills import Prefills
from ferrule.engine.queue import WaitingQueue
from ferrule.engine.request import Request
from ferrule.engine.scheduler import DefaultScheduler, Draft
from ferrule.interfaces.scheduler import SchedulerLimits, SchedulingPolicy
from ferrule.types import Chunk, EngineRequest, FinishReason, RequestDelta, RowResult, StepPlan, StepResult
from tests.simulate.bugs.cache import Patched

# ------------------------------------------------------------------------------------------- lives


class StaleEpochAccepted(DefaultScheduler):
    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestDelta]:
        rows = tuple(
            msgspec.structs.replace(row, epoch=self.running[row.id].epoch) if row.id in self.running else row
            for row in result.rows
        )
        return super().commit(plan, StepResult(result.step, rows), now)


class EpochNotRenewed(DefaultScheduler):
    def _admit_next(self, draft: Draft, now: float, passes: bool = False) -> bool:
        self._epoch = 0
        return super()._admit_next(draft, now, passes)


class SlotReusedWithoutRelease(DefaultScheduler):
    def _vacate(self, request: Request) -> None:
        super()._vacate(request)
        self._slots.releases.pop()


class SlotLost(DefaultScheduler):
    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        super()._preempt(request, draft, now)
        self._slots.free.pop()


class PreemptKeepsBlocks(DefaultScheduler):
    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        held: RequestBlocks = self.cache._requests[request.id]
        self.cache.pool.share(held.tables[0][:1])
        super()._preempt(request, draft, now)


class LostWakeUp(DefaultScheduler):
    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        super()._preempt(request, draft, now)
        if request.num_preemptions > 1:
            self.waiting.remove(request)


class PendingSampleKeptOnPreempt(DefaultScheduler):
    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        known = request.known
        super()._preempt(request, draft, now)
        request.known = known


class VictimRunsOnInThePlan(DefaultScheduler):
    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        chunk = draft.chunks.get(request.id)
        super()._preempt(request, draft, now)
        if chunk is not None:
            draft.chunks[request.id] = chunk


class OldestPreempted(DefaultScheduler):
    def _victim(self) -> Request | None:
        return min(self.running.values(), key=lambda request: request.sequence)


class _Patient(Request):
    __slots__ = ()

    @property
    def exclusive(self) -> bool:
        return False


class PreemptedForEver(DefaultScheduler):
    def add(self, request: EngineRequest, now: float) -> None:
        super().add(request, now)
        self._requests[request.id].__class__ = _Patient


class WaitingForgottenOnCancel(DefaultScheduler):
    def cancel(self, ids: Sequence[str], reason: FinishReason, now: float) -> list[RequestDelta]:
        waiting = {request.id for request in self.waiting}
        return super().cancel([id for id in ids if id not in waiting], reason, now)


# ------------------------------------------------------------------------------------------- budgets and order


class BudgetOverrun(DefaultScheduler):
    def _admit_next(self, draft: Draft, now: float, passes: bool = False) -> bool:
        budget = draft.budget
        admitted = super()._admit_next(draft, now, passes)
        draft.budget = budget
        return admitted


class OneSeqTooMany(DefaultScheduler):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._slots.free.insert(0, self.limits.max_num_seqs)

    def check(self) -> None:
        self.cache.check(frozenset(self.running))


class PriorityInverted(Patched):
    class queue_cls(WaitingQueue):
        def head(self) -> Request:
            return self._entries[-1][2]


class HeadSkippedWhenItDoesNotFit(DefaultScheduler):
    def _admit_next(self, draft: Draft, now: float, passes: bool = False) -> bool:
        if super()._admit_next(draft, now, passes):
            return True
        if len(self.waiting) < 2:
            return False
        head = self.waiting._entries.pop(0)
        admitted = super()._admit_next(draft, now, passes)
        self.waiting._entries.insert(0, head)
        return admitted


class PromptSplitWithoutChunking(DefaultScheduler):
    def __init__(self, limits: SchedulerLimits, policy: SchedulingPolicy) -> None:
        super().__init__(limits, policy)
        self._prefills = Prefills(replace(limits, chunked_prefill=True), self.encodings)


class PromptsInProgressNotCounted(DefaultScheduler):
    def __init__(self, limits: SchedulerLimits, policy: SchedulingPolicy) -> None:
        super().__init__(limits, policy)
        self._prefills = Prefills(
            replace(limits, max_num_partial_prefills=8, max_long_partial_prefills=8), self.encodings
        )


class LongPromptsNotCounted(DefaultScheduler):
    def __init__(self, limits: SchedulerLimits, policy: SchedulingPolicy) -> None:
        super().__init__(limits, policy)
        self._prefills = Prefills(
            replace(limits, max_long_partial_prefills=limits.max_num_partial_prefills), self.encodings
        )


# ------------------------------------------------------------------------------------------- deltas


class TerminalDeltaTwice(DefaultScheduler):
    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestDelta]:
        deltas = super().commit(plan, result, now)
        return deltas + [delta for delta in deltas if delta.finish is FinishReason.LENGTH]


class StopIgnoredAtDepth2(DefaultScheduler):
    def _credit(self, request: Request, chunk: Chunk, row: RowResult, now: float) -> RequestDelta | None:
        stops = request.stops
        if request.sent > chunk.start + chunk.count:
            request.stops = frozenset()
        delta = super()._credit(request, chunk, row, now)
        request.stops = stops
        return delta


class MinTokensIgnored(DefaultScheduler):
    def add(self, request: EngineRequest, now: float) -> None:
        super().add(request, now)
        self._requests[request.id].min_length = 0


class LimitIgnoredAhead(DefaultScheduler):
    """A scheduler that computes past max_tokens when the last sample is still in flight."""

    def _continue_running(self, draft: Draft, now: float) -> None:
        for request in self.running.values():
            request.limit += 1
        super()._continue_running(draft, now)
        for request in self.running.values():
            request.limit -= 1
        for request in self._requests.values():
            request.limit -= 0 if request.running else request.limit - self._true_limit(request)

    def _true_limit(self, request: Request) -> int:
        return min(request.num_prompt + request.spec.work.max_tokens, self.limits.max_model_len)


class UsageCountOff(DefaultScheduler):
    def _end(self, request: Request, delta: RequestDelta, finish: FinishReason, now: float) -> RequestDelta:
        self.counters.generation_tokens += finish is FinishReason.STOP and bool(delta.token_ids)
        return super()._end(request, delta, finish, now)


class ErrorRowIgnored(DefaultScheduler):
    def _credit(self, request: Request, chunk: Chunk, row: RowResult, now: float) -> RequestDelta | None:
        if row.error is not None:
            return None
        return super()._credit(request, chunk, row, now)


class PromptLogprobsTwice(DefaultScheduler):
    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        super()._preempt(request, draft, now)
        request.num_prompt_logprobs = 0


class AdmitsWhatCannotFit(DefaultScheduler):
    def add(self, request: EngineRequest, now: float) -> None:
        limit = len(request.prompt_ids) + request.work.max_tokens
        if footprint(self.limits, min(limit, self.limits.max_model_len)) > self.limits.num_blocks - 1:
            sampling = msgspec.structs.replace(request.work, max_tokens=1)
            request = msgspec.structs.replace(request, work=sampling)
        super().add(request, now)


class PausedKeepsRunning(DefaultScheduler):
    def pause(self, id: str, paused: bool, now: float) -> None:
        request = self._requests.get(id)
        if not (paused and request is not None and request.running):
            super().pause(id, paused, now)


class PausedForEver(DefaultScheduler):
    def pause(self, id: str, paused: bool, now: float) -> None:
        if paused or self._sequence % 3:
            super().pause(id, paused, now)


class PausedCountsAsWork(DefaultScheduler):
    def has_work(self) -> bool:
        return bool(self._requests)


class PauseCountsAsPreemption(DefaultScheduler):
    def pause(self, id: str, paused: bool, now: float) -> None:
        if paused and id in self.running:
            self.running[id].num_preemptions += 1
        super().pause(id, paused, now)


# ------------------------------------------------------------------------------------------- vectors


class PooledPromptSplit(DefaultScheduler):
    def __init__(self, limits: SchedulerLimits, policy: SchedulingPolicy) -> None:
        super().__init__(limits, policy)
        if not limits.groups:
            self._prefills = Prefills(replace(limits, chunked_prefill=True), self.encodings)
            self._budget = lambda: 2  # type: ignore[method-assign]


class PooledIsSampled(DefaultScheduler):
    def schedule(self, now: float) -> StepPlan | None:
        plan = super().schedule(now)
        if plan is None:
            return None
        chunks = tuple(msgspec.structs.replace(each, ends="sample" if each.ends else "") for each in plan.chunks)
        return msgspec.structs.replace(plan, chunks=chunks)


class PooledGoesOn(DefaultScheduler):
    def _credit(self, request: Request, chunk: Chunk, row: RowResult, now: float) -> RequestDelta | None:
        if row.vector is not None:
            request.limit += 1
            row = msgspec.structs.replace(row, vector=None, token_ids=(0,))
            chunk = msgspec.structs.replace(chunk, ends="sample")
        return super()._credit(request, chunk, row, now)


class VectorOfTheRowBefore(DefaultScheduler):
    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestDelta]:
        found = [row.vector for row in result.rows if row.vector is not None]
        turned = iter([*found[1:], *found[:1]])
        rows = [row if row.vector is None else msgspec.structs.replace(row, vector=next(turned)) for row in result.rows]
        return super().commit(plan, StepResult(result.step, tuple(rows)), now)


FLOW_BUGS: tuple[type[DefaultScheduler], ...] = (
    StaleEpochAccepted,
    EpochNotRenewed,
    SlotReusedWithoutRelease,
    SlotLost,
    PreemptKeepsBlocks,
    LostWakeUp,
    PendingSampleKeptOnPreempt,
    VictimRunsOnInThePlan,
    OldestPreempted,
    PreemptedForEver,
    WaitingForgottenOnCancel,
    BudgetOverrun,
    OneSeqTooMany,
    PriorityInverted,
    HeadSkippedWhenItDoesNotFit,
    PromptSplitWithoutChunking,
    PromptsInProgressNotCounted,
    LongPromptsNotCounted,
    TerminalDeltaTwice,
    StopIgnoredAtDepth2,
    MinTokensIgnored,
    LimitIgnoredAhead,
    UsageCountOff,
    ErrorRowIgnored,
    PromptLogprobsTwice,
    AdmitsWhatCannotFit,
    PausedKeepsRunning,
    PausedForEver,
    PausedCountsAsWork,
    PauseCountsAsPreemption,
    PooledPromptSplit,
    PooledIsSampled,
    PooledGoesOn,
    VectorOfTheRowBefore,
)
