"""Planted bugs: the simulator is trusted because it catches each of them.

Every bug is `DefaultScheduler` with one mistake of a kind that real schedulers have had. The names are those of the
`--bug` option of ``python -m ferrule_testkit.simulate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from ferrule.engine.blocks import BlockPool
from ferrule.engine.cache import BlockDelta, Holding, KVCacheManager, PrefixHit, footprint
from ferrule.engine.hashing import HashChain, root_digest
from ferrule.engine.queue import WaitingQueue
from ferrule.engine.request import Request
from ferrule.engine.scheduler import DefaultScheduler, Draft
from ferrule.types import CacheGroup, Chunk, EngineRequest, FinishReason, RequestDelta, RowResult, StepPlan, StepResult

BUGS: dict[str, type[DefaultScheduler]] = {}


def bug(cls: type[DefaultScheduler]) -> type[DefaultScheduler]:
    """Enter a scheduler under its name, CamelCase as words-with-dashes."""
    BUGS["".join("-" + c.lower() if c.isupper() else c for c in cls.__name__).strip("-")] = cls
    return cls


class Patched(DefaultScheduler):
    """Swaps the cache manager, the pool or the queue for a subclass with a mistake."""

    cache_cls: type[KVCacheManager] = KVCacheManager
    pool_cls: type[BlockPool] = BlockPool
    queue_cls: type[WaitingQueue] = WaitingQueue

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cache = self.cache_cls(self.limits)
        self.cache.pool = self.pool_cls(self.limits.num_blocks)
        self.waiting = self.queue_cls(self.policy)


# ------------------------------------------------------------------------------------------- block pool


@bug
class SkipDecref(Patched):
    class pool_cls(BlockPool):
        def release(self, blocks: Sequence[int]) -> None:
            super().release([b for b in blocks if self._references[b] < 2])


@bug
class ShareForgetsIdle(Patched):
    class pool_cls(BlockPool):
        def share(self, blocks: Iterable[int]) -> None:
            for block in blocks:
                self._references[block] += bool(block)


@bug
class ShareWithoutReference(Patched):
    class pool_cls(BlockPool):
        def share(self, blocks: Iterable[int]) -> None:
            super().share(b for b in blocks if b and not self._references[b])


@bug
class EvictsReferencedBlock(Patched):
    class pool_cls(BlockPool):
        def allocate(self, count: int) -> list[int]:
            shared = [b for b in self._published.values() if self._references[b] > 1]
            return shared[:1] + super().allocate(count - 1) if count and shared else super().allocate(count)


@bug
class EvictionKeepsPublished(Patched):
    class pool_cls(BlockPool):
        def _evict(self) -> int:
            block, _ = self._idle.popitem(last=False)
            return block


@bug
class HandsOutNullBlock(Patched):
    class pool_cls(BlockPool):
        def __init__(self, num_blocks: int) -> None:
            super().__init__(num_blocks)
            self._free = list(range(num_blocks - 1, -1, -1))


@bug
class ResetFreesUsedBlocks(Patched):
    class pool_cls(BlockPool):
        def forget(self) -> bool:
            self._free += [b for b in self._published.values() if self._references[b]]
            return super().forget()


@bug
class FreedTwiceOnAbort(DefaultScheduler):
    def cancel(self, ids: Sequence[str], reason: FinishReason, now: float) -> list[RequestDelta]:
        for id in ids:
            if id in self.running:
                self.cache.pool.release(self.cache._holdings[id].tables[0][:1])
        return super().cancel(ids, reason, now)


# ------------------------------------------------------------------------------------------- prefix cache


def _scoped(pick: Callable[[EngineRequest], tuple[str | None, ...]]) -> type[KVCacheManager]:
    class Scoped(KVCacheManager):
        def chain(self, request: EngineRequest) -> HashChain | None:
            chain = super().chain(request)
            if chain is not None:
                chain._root = root_digest(self.limits.cache_root, *pick(request))
            return chain

    return Scoped


@bug
class HashOmitsSalt(Patched):
    cache_cls = _scoped(lambda request: (request.adapter, request.media_hash))


@bug
class HashOmitsAdapter(Patched):
    cache_cls = _scoped(lambda request: (request.media_hash, request.cache_salt))


@bug
class HashOmitsMedia(Patched):
    cache_cls = _scoped(lambda request: (request.adapter, request.cache_salt))


@bug
class HashConfusesNoneWithEmpty(Patched):
    cache_cls = _scoped(lambda request: (request.adapter or "", request.media_hash or "", request.cache_salt or ""))


class _Rehashed(KVCacheManager):
    """Replaces the hasher of each chain."""

    def rehash(self, chain: HashChain) -> Callable[[bytes, Sequence[int]], bytes]:
        raise NotImplementedError

    def chain(self, request: EngineRequest) -> HashChain | None:
        chain = super().chain(request)
        if chain is not None:
            chain._hasher = self.rehash(chain)
        return chain


@bug
class HashOmitsParent(Patched):
    class cache_cls(_Rehashed):
        def rehash(self, chain: HashChain) -> Callable[[bytes, Sequence[int]], bytes]:
            inner, root = chain._hasher, chain._root
            return lambda parent, tokens: inner(root, tokens)


@bug
class HashOmitsLastToken(Patched):
    class cache_cls(_Rehashed):
        def rehash(self, chain: HashChain) -> Callable[[bytes, Sequence[int]], bytes]:
            inner = chain._hasher
            return lambda parent, tokens: inner(parent, tokens[:-1])


@bug
class GroupsShareDigests(Patched):
    class cache_cls(KVCacheManager):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._tags = (b"",) * len(self._groups)


@bug
class PartialBlockShared(Patched):
    class cache_cls(KVCacheManager):
        def confirm(self, id: str, ids: Sequence[int], computed: int) -> None:
            super().confirm(id, ids, computed + 1 if computed + 1 <= len(ids) else computed)


@bug
class HitCoversWholePrompt(Patched):
    class cache_cls(KVCacheManager):
        def match(self, chain: HashChain | None, ids: Sequence[int]) -> PrefixHit:
            return super().match(chain, [*ids, 0])


@bug
class WrongStartAfterHit(DefaultScheduler):
    def _send(self, request: Request, count: int, blocks: BlockDelta, draft: Draft) -> None:
        if request.sent == request.confirmed == request.cached > 0 and count < request.todo:
            request.sent += 1
        super()._send(request, count, blocks, draft)


@bug
class CachedTokensForgotten(DefaultScheduler):
    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestDelta]:
        return [msgspec.structs.replace(delta, cached=0) for delta in super().commit(plan, result, now)]


@bug
class PromptLogprobsReadCache(DefaultScheduler):
    def add(self, request: EngineRequest, now: float) -> None:
        super().add(request, now)
        entry = self._requests[request.id]
        if request.sampling.prompt_logprobs is not None:
            entry.num_prompt_logprobs = entry.num_prompt - 1


# ------------------------------------------------------------------------------------------- reservation


@bug
class OneTokenTooFew(Patched):
    class cache_cls(KVCacheManager):
        def reserve(
            self, id: str, upto: int, hit: PrefixHit | None = None, chain: HashChain | None = None
        ) -> BlockDelta | None:
            return super().reserve(id, upto - 1, hit, chain)


@bug
class HitBlocksCountedAsFree(Patched):
    class cache_cls(KVCacheManager):
        def _num_idle(self, hit: PrefixHit | None) -> int:
            return 0

        def room_for(self, num_tokens: int, hit: PrefixHit, owed: int) -> bool:
            return True


class _Eager(KVCacheManager):
    """Lets windowed groups forget `extra` tokens too early."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._groups = tuple(
            CacheGroup(g.kind, g.block_size, max(1, g.window - 1)) if g.window else g for g in self._groups
        )


@bug
class WindowOffByOne(Patched):
    cache_cls = _Eager


@bug
class WindowFreedWhenSent(Patched):
    class cache_cls(KVCacheManager):
        def confirm(self, id: str, ids: Sequence[int], computed: int) -> None:
            super().confirm(id, ids, min(computed + self._size, len(ids)))


@bug
class DeadBlocksNeverFreed(Patched):
    class cache_cls(KVCacheManager):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._windowed = ()

        def match(self, chain: HashChain | None, ids: Sequence[int]) -> PrefixHit:
            return super().match(None, ids)


# ------------------------------------------------------------------------------------------- lives


@bug
class StaleEpochAccepted(DefaultScheduler):
    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestDelta]:
        rows = tuple(
            msgspec.structs.replace(row, epoch=self.running[row.id].epoch) if row.id in self.running else row
            for row in result.rows
        )
        return super().commit(plan, StepResult(result.step, rows), now)


@bug
class EpochNotRenewed(DefaultScheduler):
    def _admit_head(self, draft: Draft, now: float) -> bool:
        self._epoch = 0
        return super()._admit_head(draft, now)


@bug
class SlotReusedWithoutRelease(DefaultScheduler):
    def _vacate(self, request: Request) -> None:
        super()._vacate(request)
        self._releases.pop()


@bug
class SlotLost(DefaultScheduler):
    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        super()._preempt(request, draft, now)
        self._slots.pop()


@bug
class PreemptKeepsBlocks(DefaultScheduler):
    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        held: Holding = self.cache._holdings[request.id]
        self.cache.pool.share(held.tables[0][:1])
        super()._preempt(request, draft, now)


@bug
class LostWakeUp(DefaultScheduler):
    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        super()._preempt(request, draft, now)
        if request.num_preemptions > 1:
            self.waiting.remove(request)


@bug
class PendingSampleKeptOnPreempt(DefaultScheduler):
    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        known = request.known
        super()._preempt(request, draft, now)
        request.known = known


@bug
class VictimRunsOnInThePlan(DefaultScheduler):
    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        chunk = draft.chunks.get(request.id)
        super()._preempt(request, draft, now)
        if chunk is not None:
            draft.chunks[request.id] = chunk


@bug
class OldestPreempted(DefaultScheduler):
    def _victim(self) -> Request | None:
        return min(self.running.values(), key=lambda request: request.sequence)


class _Patient(Request):
    __slots__ = ()

    @property
    def exclusive(self) -> bool:
        return False


@bug
class PreemptedForEver(DefaultScheduler):
    def add(self, request: EngineRequest, now: float) -> None:
        super().add(request, now)
        self._requests[request.id].__class__ = _Patient


@bug
class WaitingForgottenOnCancel(DefaultScheduler):
    def cancel(self, ids: Sequence[str], reason: FinishReason, now: float) -> list[RequestDelta]:
        return super().cancel([id for id in ids if id not in self.waiting], reason, now)


# ------------------------------------------------------------------------------------------- budgets and order


@bug
class BudgetOverrun(DefaultScheduler):
    def _admit_head(self, draft: Draft, now: float) -> bool:
        budget = draft.budget
        admitted = super()._admit_head(draft, now)
        draft.budget = budget
        return admitted


@bug
class OneSeqTooMany(DefaultScheduler):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._slots.insert(0, self.limits.max_num_seqs)

    def check(self) -> None:
        self.cache.check(frozenset(self.running))


@bug
class PriorityInverted(Patched):
    class queue_cls(WaitingQueue):
        def head(self) -> Request:
            return self._entries[-1][2]


@bug
class HeadSkippedWhenItDoesNotFit(DefaultScheduler):
    def _admit_head(self, draft: Draft, now: float) -> bool:
        if super()._admit_head(draft, now):
            return True
        if len(self.waiting) < 2:
            return False
        head = self.waiting._entries.pop(0)
        admitted = super()._admit_head(draft, now)
        self.waiting._entries.insert(0, head)
        return admitted


@bug
class PromptSplitWithoutChunking(DefaultScheduler):
    def _piece(self, todo: int, budget: int) -> int:
        return min(todo, budget)


# ------------------------------------------------------------------------------------------- deltas


@bug
class TerminalDeltaTwice(DefaultScheduler):
    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestDelta]:
        deltas = super().commit(plan, result, now)
        return deltas + [delta for delta in deltas if delta.finish is FinishReason.LENGTH]


@bug
class StopIgnoredAtDepth2(DefaultScheduler):
    def _credit(self, request: Request, chunk: Chunk, row: RowResult, now: float) -> RequestDelta | None:
        stops = request.stops
        if request.sent > chunk.start + chunk.count:
            request.stops = frozenset()
        delta = super()._credit(request, chunk, row, now)
        request.stops = stops
        return delta


@bug
class MinTokensIgnored(DefaultScheduler):
    def add(self, request: EngineRequest, now: float) -> None:
        super().add(request, now)
        self._requests[request.id].min_length = 0


@bug
class LimitIgnoredAhead(DefaultScheduler):
    """Computes past max_tokens when the last sample is still in flight."""

    def _continue_running(self, draft: Draft, now: float) -> None:
        for request in self.running.values():
            request.limit += 1
        super()._continue_running(draft, now)
        for request in self.running.values():
            request.limit -= 1
        for request in self._requests.values():
            request.limit -= 0 if request.running else request.limit - self._true_limit(request)

    def _true_limit(self, request: Request) -> int:
        return min(request.num_prompt + request.spec.sampling.max_tokens, self.limits.max_model_len)


@bug
class UsageCountOff(DefaultScheduler):
    def _end(self, request: Request, delta: RequestDelta, finish: FinishReason, now: float) -> RequestDelta:
        self.counters.generation_tokens += finish is FinishReason.STOP and bool(delta.token_ids)
        return super()._end(request, delta, finish, now)


@bug
class ErrorRowIgnored(DefaultScheduler):
    def _credit(self, request: Request, chunk: Chunk, row: RowResult, now: float) -> RequestDelta | None:
        if row.error is not None:
            return None
        return super()._credit(request, chunk, row, now)


@bug
class PromptLogprobsTwice(DefaultScheduler):
    def _preempt(self, request: Request, draft: Draft, now: float) -> None:
        super()._preempt(request, draft, now)
        request.num_prompt_logprobs = 0


@bug
class AdmitsWhatCannotFit(DefaultScheduler):
    def add(self, request: EngineRequest, now: float) -> None:
        limit = len(request.prompt_ids) + request.sampling.max_tokens
        if footprint(self.limits, min(limit, self.limits.max_model_len)) > self.limits.num_blocks - 1:
            sampling = msgspec.structs.replace(request.sampling, max_tokens=1)
            request = msgspec.structs.replace(request, sampling=sampling)
        super().add(request, now)
