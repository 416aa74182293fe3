"""A burst of requests has its turns, so that what runs already goes on between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 16  # requests that may begin in one turn of the event loop: a few milliseconds of work


class Turns:
    """Begins at most `AT_ONCE` requests in a turn of the loop; the others follow in the next turns, in their order."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._left = AT_ONCE
        self._counting = False  # `_next` is due

    def begin(self, start: Callable[[], None]) -> None:
        """Call `start` now, or in a later turn."""
        if self._left and not self._waiting:
            self._left -= 1
            start()
        else:
            self._waiting.append(start)
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._left = AT_ONCE
        while self._left and self._waiting:
            self._left -= 1
            self._waiting.popleft()()
        self._counting = self._left < AT_ONCE
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next)
