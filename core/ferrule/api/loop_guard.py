"""Watches the server's event loop: how late it is, and what it is doing while it is very late."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ferrule import log

_TICK = 0.02  # seconds between two looks on the loop while it has work
_REST = 0.5  # and while it has none
_COUNTED = 0.005  # seconds of lateness that are counted
_LONG = 1.0  # seconds after which the log says what the loop does
_QUIET = 60.0  # seconds between two such lines
_CALLS = 12  # innermost calls that such a line has

_logger = log.get("api")


class LoopGuard:
    """A watch over the event loop. `count` is called on the loop with the seconds of each stall.

    While nothing is `busy` it looks seldom, so that an idle server costs next to nothing; `stir` says that work begins.
    Use the guard on the loop.
    """

    def __init__(self, count: Callable[[float], None], busy: Callable[[], bool]) -> None:
        self._count = count
        self._busy = busy
        self._loop = asyncio.get_running_loop()
        self._owner = threading.get_ident()
        self._seen = self._due = time.monotonic()
        self._closed = threading.Event()
        self._tick = self._loop.call_soon(self._on_tick)
        threading.Thread(target=self._watch, name="loop-guard", daemon=True).start()

    def _on_tick(self) -> None:
        now = time.monotonic()
        if now - self._due >= _COUNTED:
            self._count(now - self._due)
        self._wait(now, _TICK if self._busy() else _REST)

    def _wait(self, now: float, seconds: float) -> None:
        self._seen, self._due = now, now + seconds
        self._tick = self._loop.call_later(seconds, self._on_tick)

    def stir(self) -> None:
        """Look often from now on, as long as there is work."""
        now = time.monotonic()
        if self._due > now + _TICK:
            self._tick.cancel()
            self._wait(now, _TICK)

    def _watch(self) -> None:
        """Log stalls, in a thread of its own: one line for each, and at most one a minute."""
        told, quiet_until = 0.0, 0.0
        while not self._closed.wait(_LONG / 2):
            seen, now = self._seen, time.monotonic()
            if now - seen < _LONG or seen == told or now < quiet_until:
                continue
            told, quiet_until = seen, now + _QUIET
            where = _place(sys._current_frames().get(self._owner))
            _logger.warning("the event loop has not turned for %.1f s: it is in %s", now - seen, where)

    def close(self) -> None:
        self._tick.cancel()
        self._due = 0.0  # so that a call that comes now does not begin it again
        self._closed.set()


def _place(frame: FrameType | None) -> str:
    """Return the innermost calls of a stack in one line, the innermost first."""
    calls = [f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in traceback.extract_stack(frame)]
    return " < ".join(calls[: -_CALLS - 1 : -1])
