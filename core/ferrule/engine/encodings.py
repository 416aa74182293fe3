"""`Encodings`: which outputs of encoders the runner keeps, and which items of prompts a step encodes.

An output is kept under the digest of its item, for all requests that may see it: `Request.media` has digests that
adapter and salt are part of. A request holds the outputs of the items in which it is; others stay until there is no
room. Plans name what to encode and what to forget, and run in order, so an output that a plan uses may be forgotten by
the next one.

Encoding is planned by the engine, so that it can end a chunk in front of an item, bound memory, and send data once.
Outputs are kept for each adapter and salt, like prefixes: otherwise the time of an answer would tell one user what
another has sent.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

from ferrule.engine.request import Request
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import MediaItem


class Encodings:
    """Sizes are tokens. An item that is larger than a step's budget is encoded alone."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.budget = limits.encode_budget or limits.max_num_batched_tokens
        self.room = limits.encoded_tokens or max(limits.max_model_len, limits.max_num_batched_tokens)
        self._whole = not limits.chunked_prefill
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # size by digest, the one unused for longest first
        self._used = 0  # sum of these
        self._holders: Counter[bytes] = Counter()  # requests that hold an output
        self._held: dict[str, set[bytes]] = {}  # by request
        self._passing: set[bytes] = set()  # kept while they are held: their requests have them ready
        self._done: list[tuple[str, bytes]] = []  # held by a request that needs it in the plan being made, and no more
        self._left = 0  # tokens that the plan being made may still encode
        self._encodes: dict[bytes, MediaItem] = {}  # of the next plan
        self._forgets: list[bytes] = []

    def admit(self, media: tuple[MediaItem, ...]) -> None:
        """Raise ValueError for a prompt with items that can never be kept."""
        sizes = [item.count for item in media]
        most = sum(sizes) if self._whole else max(sizes, default=0)
        if most > self.room:
            raise ValueError(f"{most} tokens of media do not fit the {self.room} that are kept")

    def begin(self) -> None:
        """Begin to make a plan."""
        for id, digest in self._done:
            self._let_go(id, digest)
        self._done.clear()
        self._left = self.budget - sum(item.count for item in self._encodes.values())  # of a plan that came to nothing

    def reach(self, request: Request, start: int, count: int) -> int:
        """Return how many of `count` tokens from `start` on can be computed, up to an item that must wait.

        An item waits while its output has no room beside those that are held, and, unless prompts are computed whole,
        when it would exceed what the plan may still encode. The first item of a plan never does.
        """
        budget = self._left
        room = self.room - sum(self._kept[digest] for digest in self._holders)
        for item in _touched(request, start, start + count):
            if self._holders[item.digest]:
                continue
            is_new, is_first = item.digest not in self._kept, budget == self.budget
            over_budget = is_new and not is_first and not self._whole and item.count > budget
            if over_budget or item.count > room:
                return 0 if self._whole else max(0, item.start - start)
            budget -= item.count if is_new else 0
            room -= item.count
        return count

    def send(self, request: Request, start: int, end: int) -> None:
        """Plan the encoding of media for positions [start, end), all of which `reach` allowed."""
        touched = list(_touched(request, start, end))
        held = self._held.setdefault(request.id, set())
        for digest in {item.digest for item in touched if item.digest in self._kept} - held:
            self._hold(held, digest)  # before room is made for the others
        for item in touched:
            if item.digest not in self._kept:
                self._make_room(item.count)
                self._kept[item.digest] = item.count
                self._used += item.count
                self._left -= item.count
                self._encodes[item.digest] = item
                if item.kind == "embeds":
                    self._passing.add(item.digest)
                self._hold(held, item.digest)
            self._kept.move_to_end(item.digest)
            if item.start + item.count <= end:
                self._done.append((request.id, item.digest))

    def take(self) -> dict[str, Any]:
        """Return the fields of the plan that was made which concern encoders."""
        if not (self._encodes or self._forgets):
            return {}
        found = {"encodes": tuple(self._encodes.values()), "forgets": tuple(self._forgets)}
        self._encodes, self._forgets = {}, []
        return found

    def release(self, id: str) -> None:
        """Release the media of a request that has ended, or was preempted."""
        for digest in list(self._held.get(id, ())):
            self._let_go(id, digest)
        self._held.pop(id, None)

    def forget(self) -> None:
        """Forget everything, as the runner has. No request holds anything."""
        self._kept.clear()
        self._passing.clear()
        self._encodes, self._forgets, self._used = {}, [], 0

    def check(self, live: frozenset[str]) -> None:
        """Raise AssertionError unless outputs are within their bound, and live requests alone hold some."""
        holders = Counter(digest for held in self._held.values() for digest in held)
        if +self._holders != holders or not self._held.keys() <= live or not holders.keys() <= self._kept.keys():
            raise AssertionError(f"I23: outputs of encoders are held by {sorted(self._held)}, {sorted(live)} run")
        if self._used != sum(self._kept.values()) or self._used > self.room:
            raise AssertionError(f"I23: {self._used} tokens are encoded, and there is room for {self.room}")

    def _hold(self, held: set[bytes], digest: bytes) -> None:
        held.add(digest)
        self._holders[digest] += 1

    def _let_go(self, id: str, digest: bytes) -> None:
        held = self._held.get(id, set())
        if digest in held:
            held.discard(digest)
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]
                if digest in self._passing:
                    self._drop(digest)

    def _make_room(self, count: int) -> None:
        for digest in [digest for digest in self._kept if not self._holders[digest]]:
            if self._used + count <= self.room:
                break
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        self._used -= self._kept.pop(digest)
        self._passing.discard(digest)
        if self._encodes.pop(digest, None) is None:
            self._forgets.append(digest)


def _touched(request: Request, start: int, end: int) -> Iterator[MediaItem]:
    return (item for item in request.media if item.start < end and item.start + item.count > start)
