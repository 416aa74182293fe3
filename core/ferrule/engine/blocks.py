"""`BlockPool`: who holds which block. Every operation is O(blocks it names)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence


class BlockPool:
    """Each block but 0 is in exactly one state: free, used (references > 0), or idle.

    An idle block has no reference but holds a published prefix; allocation takes it when no block is free, the one
    unused for longest first. Block 0 is the null block: it is never handed out and never written. `evicted` is told the
    key of each prefix that can no longer be found.
    """

    def __init__(self, num_blocks: int, evicted: Callable[[bytes], None] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._evicted = evicted

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_available

    def states(self, stride: int = 1) -> bytes:
        """Return a byte for every `stride`-th block from block 1 on: 0 free, 1 idle, 2 used, 3 used more than once."""
        blocks = zip(self._references[1::stride], self._keys[1::stride], strict=True)
        return bytes(min(count + 1, 3) if count else key is not None for count, key in blocks)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def find(self, key: bytes) -> int:
        """Return the block that was published under `key`, or 0."""
        return self._published.get(key, 0)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, one reference each. The caller has compared `count` with `num_available`."""
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to published blocks; null blocks are skipped."""
        for block in blocks:
            if block:
                if not self._references[block]:
                    del self._idle[block]
                self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block, last block first: the end of a prefix is reused before its beginning."""
        for block in reversed(blocks):
            if not block:
                continue
            if self._references[block] < 1:
                raise RuntimeError(f"block {block} is released, but has no reference")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Let others find a full block that a request refers to. The first block published under a key keeps it."""
        if key not in self._published and self._keys[block] is None:
            self._published[key] = block
            self._keys[block] = key

    def forget(self) -> bool:
        """Unpublish every idle block; False when used ones stay published."""
        while self._idle:
            self._free.append(self._evict())
        return not self._published

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        key = self._keys[block]
        if key is not None:
            del self._published[key]
            self._keys[block] = None
            if self._evicted is not None:
                self._evicted(key)
        return block

    def check(self, holders: Mapping[int, int]) -> None:
        """Raise AssertionError unless references equal `holders` (block -> number of tables that name it)."""
        free = set(self._free)
        if len(free) != len(self._free) or free & self._idle.keys() or 0 in free or 0 in self._idle:
            raise AssertionError("I1: a block is free twice, both free and idle, or is the null block")
        if self._references[0] or holders.get(0):
            raise AssertionError("I3: the null block has a reference")
        for block in range(1, self.num_blocks):
            references = self._references[block]
            if references != holders.get(block, 0):
                raise AssertionError(f"I2: block {block} has {references} references, {holders.get(block, 0)} holders")
            if (references > 0) + (block in free) + (block in self._idle) != 1:
                raise AssertionError(f"I1: block {block} is not in exactly one state")
            if (block in self._idle) > (self._keys[block] is not None) or (block in free and self._keys[block]):
                raise AssertionError(f"I5: block {block} is idle without a prefix, or free with one")
        named = {key: block for block, key in enumerate(self._keys) if key is not None}
        if named != self._published:
            raise AssertionError("I5: published prefixes and blocks disagree")
