"""The pace of a load, which must not hold up the thread that runs steps in the same process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LEAST, _MOST = 0.0003, 0.01  # seconds of a rest
_TURN = 0.0005  # seconds for which a thread keeps Python's lock when another wants it; usually ten times as long


class Pace:
    """Rests as long as the work before each: a load has about half of a processor's core."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def rest(self) -> None:
        """Sleep, unless there was hardly any work since the last rest."""
        worked = time.monotonic() - self._since
        if worked >= _LEAST:
            time.sleep(min(_MOST, worked))
            self._since = time.monotonic()


@contextmanager
def short_turns() -> Iterator[Pace]:
    """Let other threads have Python's lock sooner when they ask for it, for as long as a load takes."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, _TURN))
    try:
        yield Pace()
    finally:
        sys.setswitchinterval(usual)
