"""Spreads a burst of requests over turns of the event loop, so that running work goes on in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Turns:
    """A gate that lets at most `at_once()` callers through in a turn of the event loop; others follow in order."""

    def __init__(self, at_once: Callable[[], int]) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._at_once = at_once
        self._left = at_once()
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

    async def turn(self) -> None:
        """Return now, or in a later turn."""
        has_come: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def come() -> None:
            if not has_come.done():  # the task was cancelled
                has_come.set_result(None)

        self.begin(come)
        if not has_come.done():
            await has_come

    def _next(self) -> None:
        at_once = self._left = self._at_once()
        while self._left and self._waiting:
            self._left -= 1
            self._waiting.popleft()()
        self._counting = self._left < at_once
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next)
