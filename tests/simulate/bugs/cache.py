"""Planted bugs in the block pool, the prefix cache and the reservation of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ferrule.engine.blocks import BlockPool
from ferrule.engine.cache import BlockDelta, KVCacheManager, PrefixHit
from ferrule.engine.hashing import HashChain, root_digest
from ferrule.engine.queue import WaitingQueue
from ferrule.engine.request import Request
from ferrule.engine.scheduler import DefaultScheduler, Draft
from ferrule.types import CacheGroup, EngineRequest, FinishReason, RequestDelta, StepPlan, StepResult


class Patched(DefaultScheduler):
    """A scheduler whose cache manager, pool or queue is a subclass with a mistake."""

    cache_cls: type[KVCacheManager] = KVCacheManager
    pool_cls: type[BlockPool] = BlockPool
    queue_cls: type[WaitingQueue] = WaitingQueue

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cache = self.cache_cls(self.limits)
        self.cache.pool = self.pool_cls(self.limits.num_blocks, self.cache.evicted)
        self.waiting = self.queue_cls(self.policy)


# ------------------------------------------------------------------------------------------- block pool


class SkipDecref(Patched):
    class pool_cls(BlockPool):
        def release(self, blocks: Sequence[int]) -> None:
            super().release([b for b in blocks if self._references[b] < 2])


class ShareForgetsIdle(Patched):
    class pool_cls(BlockPool):
        def share(self, blocks: Iterable[int]) -> None:
            for block in blocks:
                self._references[block] += bool(block)


class ShareWithoutReference(Patched):
    class pool_cls(BlockPool):
        def share(self, blocks: Iterable[int]) -> None:
            super().share(b for b in blocks if b and not self._references[b])


class EvictsReferencedBlock(Patched):
    class pool_cls(BlockPool):
        def allocate(self, count: int) -> list[int]:
            shared = [b for b in self._published.values() if self._references[b] > 1]
            return shared[:1] + super().allocate(count - 1) if count and shared else super().allocate(count)


class EvictionKeepsPublished(Patched):
    class pool_cls(BlockPool):
        def _evict(self) -> int:
            block, _ = self._idle.popitem(last=False)
            return block


class HandsOutNullBlock(Patched):
    class pool_cls(BlockPool):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            num_blocks = self.num_blocks
            self._free = list(range(num_blocks - 1, -1, -1))


class ResetFreesUsedBlocks(Patched):
    class pool_cls(BlockPool):
        def forget(self) -> bool:
            self._free += [b for b in self._published.values() if self._references[b]]
            return super().forget()


class FreedTwiceOnAbort(DefaultScheduler):
    def cancel(self, ids: Sequence[str], reason: FinishReason, now: float) -> list[RequestDelta]:
        for id in ids:
            if id in self.running:
                self.cache.pool.release(self.cache._requests[id].tables[0][:1])
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


def _adapter(request: EngineRequest) -> str | None:
    return None if request.adapter is None else request.adapter.name


class HashOmitsSalt(Patched):
    cache_cls = _scoped(lambda request: (_adapter(request),))


class HashOmitsAdapter(Patched):
    cache_cls = _scoped(lambda request: (request.cache_salt,))


class HashConfusesNoneWithEmpty(Patched):
    cache_cls = _scoped(lambda request: (_adapter(request) or "", request.cache_salt or ""))


class _Rehashed(KVCacheManager):
    """A manager that replaces the hasher of each chain."""

    def rehash(self, chain: HashChain) -> Callable[[bytes, Sequence[int]], bytes]:
        raise NotImplementedError

    def chain(self, request: EngineRequest) -> HashChain | None:
        chain = super().chain(request)
        if chain is not None:
            chain._hasher = self.rehash(chain)
        return chain


class HashOmitsParent(Patched):
    class cache_cls(_Rehashed):
        def rehash(self, chain: HashChain) -> Callable[[bytes, Sequence[int]], bytes]:
            inner, root = chain._hasher, chain._root
            return lambda parent, tokens: inner(root, tokens)


class HashOmitsLastToken(Patched):
    class cache_cls(_Rehashed):
        def rehash(self, chain: HashChain) -> Callable[[bytes, Sequence[int]], bytes]:
            inner = chain._hasher
            return lambda parent, tokens: inner(parent, tokens[:-1])


class GroupsShareDigests(Patched):
    class cache_cls(KVCacheManager):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._tags = (b"",) * len(self._groups)


class PartialBlockShared(Patched):
    class cache_cls(KVCacheManager):
        def confirm(self, id: str, ids: Sequence[int], computed: int) -> None:
            super().confirm(id, ids, computed + 1 if computed + 1 <= len(ids) else computed)


class HitCoversWholePrompt(Patched):
    class cache_cls(KVCacheManager):
        def match(self, chain: HashChain | None, ids: Sequence[int], reads: bool = True) -> PrefixHit:
            return super().match(chain, [*ids, 0], reads)


class WrongStartAfterHit(DefaultScheduler):
    def _send(self, request: Request, count: int, blocks: BlockDelta, draft: Draft) -> None:
        if request.sent == request.confirmed == request.cached > 0 and count < request.todo:
            request.sent += 1
        super()._send(request, count, blocks, draft)


class CachedTokensForgotten(DefaultScheduler):
    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestDelta]:
        return [msgspec.structs.replace(delta, cached=0) for delta in super().commit(plan, result, now)]


class PromptLogprobsReadCache(DefaultScheduler):
    def add(self, request: EngineRequest, now: float) -> None:
        super().add(request, now)
        entry = self._requests[request.id]
        if request.work.prompt_logprobs is not None:
            entry.num_prompt_logprobs = entry.num_prompt - 1


# ------------------------------------------------------------------------------------------- reservation


class OneTokenTooFew(Patched):
    class cache_cls(KVCacheManager):
        def reserve(
            self, id: str, upto: int, hit: PrefixHit | None = None, chain: HashChain | None = None, ahead: int = 0
        ) -> BlockDelta | None:
            return super().reserve(id, upto - 1, hit, chain, ahead)


class HitBlocksCountedAsFree(Patched):
    class cache_cls(KVCacheManager):
        def _num_idle(self, hit: PrefixHit | None) -> int:
            return 0

        def room_for(self, num_tokens: int, hit: PrefixHit, owed: int) -> bool:
            return True


class _Eager(KVCacheManager):
    """A manager that lets windowed groups forget `extra` tokens too early."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._groups = tuple(
            CacheGroup(g.kind, g.block_size, max(1, g.window - 1)) if g.window else g for g in self._groups
        )


class WindowOffByOne(Patched):
    cache_cls = _Eager


class WindowFreedWhenSent(Patched):
    class cache_cls(KVCacheManager):
        def confirm(self, id: str, ids: Sequence[int], computed: int) -> None:
            super().confirm(id, ids, min(computed + self._size, len(ids)))


class DeadBlocksNeverFreed(Patched):
    class cache_cls(KVCacheManager):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._windowed = ()

        def match(self, chain: HashChain | None, ids: Sequence[int], reads: bool = True) -> PrefixHit:
            return super().match(None, ids)


# ------------------------------------------------------------------------------------------- states


class ReusesPrefixOfState(Patched):
    class cache_cls(KVCacheManager):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._reusable = self.limits.prefix_caching
            self._interval = 0


class HitBeyondSnapshot(Patched):
    class cache_cls(KVCacheManager):
        def match(self, chain: HashChain | None, ids: Sequence[int], reads: bool = True) -> PrefixHit:
            hit = super().match(chain, ids, reads)
            if not hit.snapshot or chain is None:
                return hit
            self._interval, kept = 0, self._interval
            longer = super().match(chain, ids, reads)
            self._interval = kept
            return replace(hit, tokens=longer.tokens, blocks=longer.blocks)


class StatesNotRestored(DefaultScheduler):
    def schedule(self, now: float) -> StepPlan | None:
        plan = super().schedule(now)
        return plan and msgspec.structs.replace(
            plan, admits=tuple(msgspec.structs.replace(admit, restore=0) for admit in plan.admits)
        )


class SnapshotUnderAnotherBorder(Patched):
    class cache_cls(KVCacheManager):
        def save(self, id: str, ids: Sequence[int], end: int) -> int:
            snapshot = super().save(id, ids, end)
            if snapshot:
                saving = self._requests[id].saving
                saving[end + self._size] = saving.pop(end)
            return snapshot


class SnapshotOutlivesItsBlocks(Patched):
    class cache_cls(KVCacheManager):
        def evicted(self, key: bytes) -> None:
            pass


class SnapshotFoundBeforeItIsWritten(Patched):
    class cache_cls(KVCacheManager):
        def save(self, id: str, ids: Sequence[int], end: int) -> int:
            snapshot = super().save(id, ids, end)
            held = self._requests[id]
            if snapshot and held.chain is not None and end <= len(ids):
                self.snapshots.publish(held.saving.pop(end), held.chain.digests[end // self._size - 1])
            return snapshot


class SnapshotOfTheEndedLost(Patched):
    class cache_cls(KVCacheManager):
        def release(self, id: str) -> None:
            self._requests[id].saving.clear()
            super().release(id)


class SnapshotTakenTwice(Patched):
    class cache_cls(KVCacheManager):
        def save(self, id: str, ids: Sequence[int], end: int) -> int:
            snapshot = super().save(id, ids, end)
            self.snapshots.give_back([snapshot] if snapshot else [])
            return snapshot


class MoreSnapshotsThanRoom(Patched):
    class cache_cls(KVCacheManager):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.snapshots.count *= 2


CACHE_BUGS: tuple[type[DefaultScheduler], ...] = (
    SkipDecref,
    ShareForgetsIdle,
    ShareWithoutReference,
    EvictsReferencedBlock,
    EvictionKeepsPublished,
    HandsOutNullBlock,
    ResetFreesUsedBlocks,
    FreedTwiceOnAbort,
    HashOmitsSalt,
    HashOmitsAdapter,
    HashConfusesNoneWithEmpty,
    HashOmitsParent,
    HashOmitsLastToken,
    GroupsShareDigests,
    PartialBlockShared,
    HitCoversWholePrompt,
    WrongStartAfterHit,
    CachedTokensForgotten,
    PromptLogprobsReadCache,
    OneTokenTooFew,
    HitBlocksCountedAsFree,
    WindowOffByOne,
    WindowFreedWhenSent,
    DeadBlocksNeverFreed,
    ReusesPrefixOfState,
    HitBeyondSnapshot,
    StatesNotRestored,
    SnapshotUnderAnotherBorder,
    SnapshotOutlivesItsBlocks,
    SnapshotFoundBeforeItIsWritten,
    SnapshotOfTheEndedLost,
    SnapshotTakenTwice,
    MoreSnapshotsThanRoom,
)
