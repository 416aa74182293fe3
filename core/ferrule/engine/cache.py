"""`KVCacheManager`: which blocks a request has in each cache group, and which prefixes can be reused.

All groups have the same block size and draw from one pool, so every table of a request has the same length. A block is
published once it is full *and confirmed*; so a shared block is never written, and no partial block is ever shared.

A windowed group releases blocks that will not be read again (`CacheGroup.dead_before`) when a later block fills. The
manager's entry becomes 0; the runner is not told: its table keeps the stale id, which may by then belong to
another request. So whoever computes positions from `start` on must not read below ``dead_before(start)``.

A recurrent group has no blocks, and what it keeps can be entered only where it was saved. In a model that has one, a
hit ends at a border of which there is a snapshot (`ferrule.engine.snapshots`); a snapshot goes with the blocks that
end there. Without room for snapshots, no prefix is reused. A model without groups, such as an encoder, keeps nothing.

All groups draw from one pool of ids. A block is one page of every layer of its group, and layer j of each group uses
storage tensor j. Block 0 is the null block. Layers with chunks (Llama 4) release blocks like windows of the same
length: a window that ends at the newest token covers the token's own chunk. Blocks would go sooner at a chunk's border,
but the most that a request uses would be the same.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ferrule.engine.blocks import BlockPool
from ferrule.engine.hashing import HASHERS, HashChain, root_digest
from ferrule.engine.snapshots import NOWHERE, Borders, SnapshotPool, interval_of
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import CacheGroup, EngineRequest

BlockDelta = tuple[tuple[int, ...], ...]
"""Block ids appended to the table of each group; the empty tuple when there are none."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """`tokens` leading positions that need not be computed, and their blocks in each group; dead ones are 0.

    In a model with states, `snapshot` has those after these positions; 0 at the beginning.
    """

    tokens: int
    blocks: BlockDelta
    snapshot: int = 0
    borders: Borders = NOWHERE  # of the life that begins with the hit


class RequestBlocks:
    """The blocks that one request holds, by group."""

    __slots__ = ("alive_from", "capacity", "chain", "next_full", "num_full", "saving", "tables")

    def __init__(self, num_groups: int, chain: HashChain | None) -> None:
        self.chain = chain
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.alive_from = [0] * num_groups  # blocks before this index are dead
        self.capacity = 0  # tokens that the tables have room for
        self.num_full = 0  # blocks that are full and confirmed
        self.next_full = 0  # confirmed tokens at which num_full grows
        self.saving: dict[int, int] = {}  # snapshots that plans in flight write, by the border


def footprint(limits: SchedulerLimits, num_tokens: int) -> int:
    """Return the most blocks that one request holds at a time on its way to `num_tokens` cached positions.

    A windowed group keeps the window of a chunk's first token, the chunk, and up to a block at either end.
    """
    total = 0
    for group in (group for group in limits.groups if group.paged):
        size = group.block_size
        blocks = -(-num_tokens // size)
        if group.window:
            span = group.window - 1 + size - 1 + limits.max_num_batched_tokens
            blocks = min(blocks, -(-span // size) + 1)
        total += blocks
    return total


def capacity(limits: SchedulerLimits) -> int:
    """Return the most tokens, prompt and output, that one request can have: the last token is never in the cache."""
    lengths = range(1, limits.max_model_len + 1)
    return bisect_right(lengths, limits.num_blocks - 1, key=lambda length: footprint(limits, length - 1))


class KVCacheManager:
    """Owns the blocks. `limits` gives groups, pool size, and whether and how prefixes are kept."""

    def __init__(self, limits: SchedulerLimits) -> None:
        sizes = {group.block_size for group in limits.groups}
        kinds = {group.kind for group in limits.groups}
        if len(sizes) > 1 or not kinds <= {"full", "sliding", "recurrent"}:
            raise ValueError(f"cache groups of one block size, full, sliding or recurrent, are needed: {limits.groups}")
        if sorted(limits.groups, key=lambda group: not group.paged) != list(limits.groups):
            raise ValueError(f"recurrent cache groups come last: {limits.groups}")
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, self.evicted)
        self._size = sizes.pop() if sizes else 1
        self._hasher = HASHERS[limits.hash_algo]()
        self._groups: tuple[CacheGroup, ...] = tuple(group for group in limits.groups if group.paged)
        stateful = len(self._groups) < len(limits.groups)
        self._reusable = limits.prefix_caching and bool(limits.groups) and (limits.num_snapshots > 0 or not stateful)
        self.snapshots = SnapshotPool(limits.num_snapshots if stateful and self._reusable else 0)
        self._interval = interval_of(limits, self._size) if self.snapshots.count else 0
        self._windowed = tuple(g for g, group in enumerate(self._groups) if group.window)
        self._full = tuple(g for g, group in enumerate(self._groups) if not group.window)
        self._tags = tuple(g.to_bytes(2, "little") for g in range(len(self._groups)))
        self._requests: dict[str, RequestBlocks] = {}

    def chain(self, request: EngineRequest) -> HashChain | None:
        """Return the request's digests, or None when prefixes are not kept."""
        if not self._reusable:
            return None
        border = self.limits.prompt_border
        length = None if border is None else border.scope(len(request.prompt_ids))
        adapter = None if request.adapter is None else request.adapter.name
        root = root_digest(self.limits.cache_root, adapter, request.cache_salt, length)
        return HashChain(root, self._size, self._hasher, request.media)

    def match(self, chain: HashChain | None, ids: Sequence[int], reads: bool = True) -> PrefixHit:
        """Find the longest reusable beginning of `ids`. It is never all of them, because the last token must be
        computed.

        Without `reads` nothing is found: such a request computes all of its prompt and keeps it for others.
        """
        if chain is None:
            return PrefixHit(0, ((),) * len(self._groups))
        most = (len(ids) - 1) // self._size
        digests = chain.grow(ids, most)
        common = self._common_prefix(digests, most) if reads else 0
        count = self._shrink(digests, common)
        blocks = []
        for g, group in enumerate(self._groups):
            dead = group.dead_before(count * self._size) // self._size
            blocks.append((0,) * dead + tuple(self._find(g, digests[i]) for i in range(dead, count)))
        hit = PrefixHit(count * self._size, tuple(blocks))
        if not self._interval:
            return hit
        snapshot = self.snapshots.use(digests[count - 1]) if count else 0
        return replace(hit, snapshot=snapshot, borders=self._borders(hit.tokens, common, most))

    def _borders(self, begin: int, common: int, most: int) -> Borders:
        """Save the states of a prompt where another cached prompt branches off, and at its last full block."""
        stops = (common * self._size, most * self._size) if self.limits.chunked_prefill else ()
        return Borders(self._size, self._interval, begin, stops)

    def reserve(
        self, id: str, upto: int, hit: PrefixHit | None = None, chain: HashChain | None = None, ahead: int = 0
    ) -> BlockDelta | None:
        """Make room for positions [0, upto), and for `ahead` more as far as that leaves a block for each request.

        `hit` begins a new life with those blocks. Returns what was appended to the tables, or None, with nothing
        changed, when there are not enough blocks.
        """
        if hit is None:
            held = self._requests[id]
            if upto + ahead <= held.capacity:
                return ()
        else:
            held = RequestBlocks(len(self._groups), chain)
        num_present = (held.capacity if hit is None else hit.tokens) // self._size
        each = max(0, -(-upto // self._size) - num_present)
        free = self.pool.num_available - self._num_idle(hit)
        if each * len(self._groups) > free:
            return None
        if ahead and self._groups:
            spare = free // len(self._groups) - len(self._requests)
            each = max(each, min(-(-(upto + ahead) // self._size) - num_present, spare))
        if not each and hit is None:
            return ()
        if hit is not None:
            self._begin(id, held, hit)
        fresh = self.pool.allocate(each * len(self._groups))
        held.capacity += each * self._size
        for g, table in enumerate(held.tables):
            table += fresh[g * each : (g + 1) * each]
        first = 0 if hit is not None else num_present
        return tuple(tuple(table[first:]) for table in held.tables)

    def room(self, id: str) -> int:
        """Count the positions that `reserve` can make room for."""
        if not self._groups:
            return sys.maxsize
        return self._requests[id].capacity + self.pool.num_available // len(self._groups) * self._size

    def room_for(self, num_tokens: int, hit: PrefixHit, owed: int) -> bool:
        """Return whether a request of `num_tokens`, of which `hit` is cached, fits beside `owed` blocks promised to
        others.
        """
        found = sum(len(blocks) - blocks.count(0) for blocks in hit.blocks)
        free = self.pool.num_available - self._num_idle(hit)
        return footprint(self.limits, num_tokens) - found <= free - owed

    def owed(self, id: str, num_tokens: int) -> int:
        """Count the blocks that a request still needs on its way to `num_tokens`."""
        return max(0, footprint(self.limits, num_tokens) - self.held(id))

    def held(self, id: str) -> int:
        """Count the blocks that a running request holds, shared ones included."""
        held = self._requests[id]
        return sum(len(table) for table in held.tables) - sum(held.alive_from)

    def confirm(self, id: str, ids: Sequence[int], computed: int) -> None:
        """Note that positions [0, computed) are in the cache: publish blocks that filled, release those that died."""
        held = self._requests[id]
        if computed < held.next_full:
            return
        num_full = computed // self._size
        if held.chain is not None:
            digests = held.chain.grow(ids, num_full)
            for g, table in enumerate(held.tables):
                for i in range(held.num_full, num_full):
                    if table[i]:
                        self.pool.publish(table[i], digests[i] + self._tags[g])
            if computed in held.saving:
                self.snapshots.publish(held.saving.pop(computed), digests[num_full - 1])
        held.num_full = num_full
        held.next_full = (num_full + 1) * self._size
        for g in self._windowed:
            dead = self._groups[g].dead_before(computed) // self._size
            first = held.alive_from[g]
            if dead > first:
                table = held.tables[g]
                self.pool.release(table[first:dead])
                table[first:dead] = [0] * (dead - first)
                held.alive_from[g] = dead

    def save(self, id: str, ids: Sequence[int], end: int) -> int:
        """Take a snapshot for the states after positions [0, end). Return 0 when they are saved already, or none is
        free.

        The snapshot can be found once these positions are confirmed.
        """
        held, count = self._requests[id], end // self._size
        if held.chain is None or (end <= len(ids) and held.chain.grow(ids, count)[count - 1] in self.snapshots):
            return 0
        snapshot = self.snapshots.take()
        if snapshot:
            held.saving[end] = snapshot
        return snapshot

    def evicted(self, key: bytes) -> None:
        """Drop the states behind a block that the pool forgets."""
        self.snapshots.drop(key[: -len(self._tags[0])])

    def release(self, id: str) -> None:
        """Let go of everything that `id` holds. Published blocks stay findable until they are needed."""
        held = self._requests.pop(id)
        self.snapshots.give_back(held.saving.values())
        for table in held.tables:
            self.pool.release(table)

    def usage(self) -> dict[str, int]:
        """Return the fields of `EngineStats` about blocks and snapshots."""
        pool, saved = self.pool, self.snapshots.num_published
        totals = {"blocks_total": pool.num_blocks - 1, "blocks_used": pool.num_used}
        return totals | {"blocks_cached": pool.num_idle, "snapshots": saved}

    def reset(self) -> bool:
        """Forget prefixes that no request holds; False when some are held."""
        if not self._groups:
            self.snapshots.clear()
        return self.pool.forget()

    def check(self, live: frozenset[str]) -> None:
        """Raise AssertionError unless exactly the requests in `live` hold blocks and the pool agrees with them."""
        if live != self._requests.keys():
            raise AssertionError(f"I4: blocks held for {sorted(live ^ self._requests.keys())} do not match who runs")
        tables = [table for held in self._requests.values() for table in held.tables]
        self.pool.check(Counter(block for table in tables for block in table if block))
        for id, held in self._requests.items():
            if any(len(table) * self._size != held.capacity for table in held.tables):
                raise AssertionError(f"I2: tables of {id} do not have room for {held.capacity} tokens")
        self.snapshots.check([each for held in self._requests.values() for each in held.saving.values()])
        if not all(self._find(g, digest) for digest in self.snapshots for g in range(len(self._groups))):
            raise AssertionError("I18: a snapshot is left of a prefix whose blocks are gone")

    def _find(self, group: int, digest: bytes) -> int:
        return self.pool.find(digest + self._tags[group])

    def _common_prefix(self, digests: list[bytes], most: int) -> int:
        for i in range(most):
            if not all(self._find(g, digests[i]) for g in self._full):
                return i
        return most

    def _shrink(self, digests: list[bytes], count: int) -> int:
        """Return the most blocks, up to `count`, behind which a request can begin: all windows and states are there."""
        count = self._shrink_to_windows(digests, count)
        while self._interval and count and digests[count - 1] not in self.snapshots:
            count = self._shrink_to_windows(digests, count - 1)
        return count

    def _shrink_to_windows(self, digests: list[bytes], count: int) -> int:
        """Return the most blocks, up to `count`, of which every windowed group has the window of the next token.

        A block that is missing at index i leaves only counts whose windows do not cover it: at most i.
        """
        before = -1
        while before != count:
            before = count
            for g in self._windowed:
                i = count - 1
                while i >= self._groups[g].dead_before(count * self._size) // self._size:
                    if not self._find(g, digests[i]):
                        count = i
                    i -= 1
        return count

    def _num_idle(self, hit: PrefixHit | None) -> int:
        return sum(map(self.pool.is_idle, (b for blocks in hit.blocks for b in blocks))) if hit else 0

    def _begin(self, id: str, held: RequestBlocks, hit: PrefixHit) -> None:
        self._requests[id] = held
        held.capacity = hit.tokens
        held.num_full = hit.tokens // self._size
        held.next_full = hit.tokens + self._size
        for g, blocks in enumerate(hit.blocks):
            self.pool.share(blocks)
            held.tables[g] = list(blocks)
            held.alive_from[g] = self._groups[g].dead_before(hit.tokens) // self._size
