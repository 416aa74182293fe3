"""The pace of a load, which must not hold up the thread that runs steps in the same process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LEAST, _MOST = 0.0003, 0.01  # seconds of a rest
_TURN = 0.0005  # seconds for which a thread keeps Python's lock when another wants it; usually ten times as long


class Pace:
    """Rests as long as the work before each: a load has about half of a processor's core. `rests` counts them."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self.rests = 0

    def rest(self) -> None:
        """Sleep, unless there was hardly any work since the last rest."""
        self.rests += 1
        worked = time.monotonic() - self._since
        if worked >= _LEAST:
            time.sleep(min(_MOST, worked))
            self._since = time.monotonic()


class _Turns:
    """The time for which a thread keeps Python's lock, while there are loads: a process may have several at once."""

    def __init__(self) -> None:
        self._lock, self._loads, self._usual = threading.Lock(), 0, 0.0

    @contextmanager
    def __call__(self) -> Iterator[Pace]:
        """Let other threads have the lock sooner when they ask for it, for as long as a load takes."""
        self._count(1)
        try:
            yield Pace()
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            if not self._loads:
                self._usual = sys.getswitchinterval()
            self._loads += more
            sys.setswitchinterval(min(self._usual, _TURN) if self._loads else self._usual)


short_turns = _Turns()
