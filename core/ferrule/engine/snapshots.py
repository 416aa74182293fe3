"""States of recurrent layers at the borders of blocks: where they are saved, and which ones can be found.

A prefix of a model with states can be reused up to a border at which its states were saved. A snapshot is a number
from 1 on that stands for a place on the device. Plans name it: a chunk's states are saved there, an admission's are
restored from there. Plans run in order, so a snapshot may be given away as soon as the host decides so.

The runner stores a recurrent group's states by slot: it zeroes them at admission or copies a snapshot to them, and the
model updates them in place. The engine only decides where they are saved (`Chunk.save`) and what an admission begins
with (`Admit.restore`).

States are saved where a step ends at a border of blocks: at the last full block of a prompt, where a prompt parts from
one that is cached, and at intervals where a chunk or a token ends at a border anyway. Only the first two make a chunk
end earlier, and only if at least four blocks lie before them, because a step costs more than a few tokens do. To save
in the middle of a chunk would be a promise that every layer has to keep. Snapshots of every block would need more
memory than the blocks, so the interval is such that the longest request fills half of the snapshots, and is at least
four blocks.

Snapshots get a quarter of the cache's memory beside running requests (all of it in a model of states alone), and are
not more than blocks. If all are in use, the one that was unused for longest makes room. A prompt of which only the rest
behind its last full block is missing does not count as in progress: otherwise prompts would be served one by one,
because each ends in two steps.

A state after a wrong guess cannot be undone, and a copy for each token would need support in every layer. So the copy
from before the guesses is put back, and the few tokens that counted join the request's next chunk.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator

from ferrule.interfaces.scheduler import SchedulerLimits

LEAST_BLOCKS = 4  # from where a request begins to where its states are saved: a hit must be worth an additional step


class Borders:
    """Borders between blocks at which the states of one request are saved, in one life. Counts are in tokens.

    A chunk always ends at one of `stops`. Where a chunk ends anyway, prompts and output are saved every `interval`; 0:
    never, because the model has no states or there is no room.
    """

    __slots__ = ("interval", "last", "size", "stops")

    def __init__(self, size: int = 1, interval: int = 0, begin: int = 0, stops: Collection[int] = ()) -> None:
        """Begin a life at position `begin`. Stops that are too near to it are left out."""
        self.size = size
        self.interval = interval
        self.last = begin  # border that was saved last, or begun from
        self.stops = tuple(sorted({each for each in stops if each - begin >= LEAST_BLOCKS * size}))

    def whole(self, known: int) -> int:
        """Return the position at which a prompt of `known` tokens counts as computed: at most a block follows its last
        stop.
        """
        return self.stops[-1] if self.stops else known

    def end(self, start: int, end: int, known: int) -> int:
        """Return where a chunk that may compute [start, end) should end."""
        if not self.interval:
            return end
        for stop in self.stops:
            if start < stop < end:
                return stop
        border = end - end % self.size
        return border if start < border and end < known and self._due(border) else end

    def room(self, end: int) -> int:
        """Return how many guesses may follow `end`.

        States are saved behind known tokens, so no guess reaches the border where the next states are due.
        """
        if not self.interval:
            return sys.maxsize
        border = max(self.last + self.interval, end + -end % self.size)
        return max(0, border - 1 - end)

    def save(self, end: int) -> bool:
        """Return whether the states after a chunk that ends at `end` are to be saved. Call this once for each chunk."""
        due = bool(self.interval) and self._due(end)
        if due:
            self.last = end
        return due

    def _due(self, end: int) -> bool:
        return end % self.size == 0 and (end in self.stops or end - self.last >= self.interval)


NOWHERE = Borders()


def interval_of(limits: SchedulerLimits, size: int) -> int:
    """Return the tokens between snapshots, in whole blocks: one request of the longest length takes half of them at
    most.
    """
    blocks = max(LEAST_BLOCKS, -(-2 * limits.max_model_len // (limits.num_snapshots * size)))
    return blocks * size


class SnapshotPool:
    """Each of `count` snapshots is free, taken by a request whose plan is in flight, or published under a digest.

    When none is free, the published one that was unused for longest is taken.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._published: OrderedDict[bytes, int] = OrderedDict()
        self._free: list[int] = []
        self._num_made = 0  # numbers above were never used

    @property
    def num_published(self) -> int:
        return len(self._published)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._published

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._published)

    def use(self, digest: bytes) -> int:
        """Return the snapshot that was published under `digest`."""
        self._published.move_to_end(digest)
        return self._published[digest]

    def take(self) -> int:
        """Return a snapshot to save to, or 0 when all are taken."""
        if self._free:
            return self._free.pop()
        if self._num_made < self.count:
            self._num_made += 1
            return self._num_made
        return self._published.popitem(last=False)[1] if self._published else 0

    def publish(self, snapshot: int, digest: bytes) -> None:
        """Let others find a snapshot that was taken and is written. The first one under a digest keeps it."""
        if digest in self._published:
            self._free.append(snapshot)
        else:
            self._published[digest] = snapshot

    def give_back(self, snapshots: Collection[int]) -> None:
        """Take back the snapshots of a request that has ended."""
        self._free += snapshots

    def drop(self, digest: bytes) -> None:
        """Drop the snapshot of a prefix whose blocks are gone."""
        snapshot = self._published.pop(digest, 0)
        if snapshot:
            self._free.append(snapshot)

    def clear(self) -> None:
        """Drop all that can be found."""
        self._free += self._published.values()
        self._published.clear()

    def check(self, taken: Collection[int]) -> None:
        """Raise AssertionError unless each snapshot is in one state, and `taken` are those of live requests."""
        states = sorted([*self._free, *self._published.values(), *taken])
        if states != list(range(1, self._num_made + 1)) or self._num_made > self.count:
            raise AssertionError(f"I18: of {self._num_made} snapshots of {self.count}, these have an owner: {states}")
