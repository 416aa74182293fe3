"""The memory budget for request bodies and the values decoded from them.

Room is reserved before a body is read, within limits for one exchange, for one API key and for all together. When there
is no room, reading pauses for a while (the client feels that as flow control), and then the request is refused. A body
of a megabyte or more reserves all of its room at once, one such body after another, so that half-read bodies never wait
for each other. A body that hardly makes progress while others wait for room is ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field

from ferrule.errors import FerruleError, OverloadedError, TooLargeError, TooSlowError, UnavailableError
from ferrule.shared_memory.buffers import Buffers, Share

LARGE = 1 << 20  # bytes of a body that gets its room at once
_LARGE_PART = 0.75  # of the limit that such bodies may fill: what they turn out to hold needs some more
_POLL = 0.05  # seconds between two looks for room
_PERIOD = 2.0  # seconds in which a body that others wait for must bring
_SLOW = 64 << 10  # so many bytes at least,
_SLOWEST = 60  # and this part of what it has reserved


@dataclass(eq=False)
class Claim:
    """The memory reserved for one exchange. `end` stops the exchange."""

    share: Share
    end: Callable[[FerruleError], None]
    key: str = ""  # name of the API key
    received: int = 0
    reading: bool = False  # its body is coming in, and is waited for
    seen: tuple[float, int] = field(default=(0.0, 0))  # when it was looked at last, and what had come by then


class Budget:
    """The memory budget of one process.

    While there are several API `keys`, one gets at most half of the budget. A wait for room is given up after
    `patience` seconds.
    """

    def __init__(self, buffers: Buffers, keys: Sized = (), patience: float = 10.0) -> None:
        self.buffers = buffers
        self._patience = patience
        self._all_keys = keys
        self._keys: Counter[str] = Counter()  # bytes that each key has
        self._claims: set[Claim] = set()
        self._turn = asyncio.Lock()  # of large bodies, first come, first served

    @contextmanager
    def claim(self, end: Callable[[FerruleError], None]) -> Iterator[Claim]:
        """Register an empty claim for the length of a block; its memory is released at the end."""
        claim = Claim(self.buffers.share(), end)
        self._claims.add(claim)
        try:
            yield claim
        finally:
            self._claims.discard(claim)
            self.resize(claim, 0)

    async def grow(self, claim: Claim, num_bytes: int, turn: bool = False) -> None:
        """Reserve `num_bytes` more for a claim, waiting for room; `turn` reserves them as a large body does.

        Raises TooLargeError, OverloadedError (the key has used its part), UnavailableError (the budget is used up).
        """
        if self._room(claim, num_bytes, turn) and not (turn and self._turn.locked()):
            self.resize(claim, claim.share.size + num_bytes)
            return
        if claim.share.size + num_bytes > (self.most if turn else self._key_limit):
            raise TooLargeError(
                f"The request needs more memory than one may have; all have {self.buffers.limit} bytes "
                "(--max-buffered-bytes)."
            )
        reading, claim.reading = claim.reading, False
        try:
            async with asyncio.timeout(self._patience):
                if turn:
                    async with self._turn:
                        await self._wait(claim, num_bytes, turn)
                else:
                    await self._wait(claim, num_bytes, turn)
        except TimeoutError:
            pass  # refused below, where the exception has no context: its frames would keep the body
        else:
            return
        finally:
            claim.reading, claim.seen = reading, (0.0, 0)
        raise self._refusal(claim, num_bytes)

    def resize(self, claim: Claim, size: int) -> None:
        """Set the number of bytes that a claim has, whether there is room or not."""
        more = size - claim.share.size
        claim.share.grow(more)
        self._keys[claim.key] += more
        if not self._keys[claim.key]:
            del self._keys[claim.key]

    @property
    def most(self) -> int:
        """The number of bytes that a large body may reserve."""
        return min(int(self.buffers.limit * _LARGE_PART), self._key_limit)

    @property
    def _key_limit(self) -> int:
        return self.buffers.limit // 2 if len(self._all_keys) > 1 else self.buffers.limit

    def _room(self, claim: Claim, num_bytes: int, turn: bool) -> bool:
        if self._keys[claim.key] + num_bytes > self._key_limit:
            return False
        return self.buffers.used + num_bytes <= self.buffers.limit * (_LARGE_PART if turn else 1)

    async def _wait(self, claim: Claim, num_bytes: int, turn: bool) -> None:
        while not self._room(claim, num_bytes, turn):
            self._end_slow()
            await asyncio.sleep(_POLL)
        self.resize(claim, claim.share.size + num_bytes)

    def _end_slow(self) -> None:
        """End exchanges whose bodies hardly make progress while others wait for the room that they have."""
        now = time.monotonic()
        for claim in self._claims:
            if not claim.reading or claim.share.size < _SLOW:
                continue
            since, received = claim.seen
            if now - since < _PERIOD:
                continue
            claim.seen = now, claim.received
            enough = max(_SLOW, claim.share.size // _SLOWEST)
            if now - since < 2 * _PERIOD and claim.received - received < enough:
                claim.end(TooSlowError("The body came too slowly while the server was short of memory."))

    def _refusal(self, claim: Claim, num_bytes: int) -> FerruleError:
        if len(self._all_keys) > 1 and self._keys[claim.key] + num_bytes > self._key_limit:
            return OverloadedError("The key's other requests take all of its memory.", retry_after=1)
        return UnavailableError("The server is short of memory for requests.", retry_after=1)
