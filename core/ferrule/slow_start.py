"""A part of a start that takes long says in the log what it waits for; one with a limit ends the process at last.

A thread beside the part that hangs logs where it is. An import cannot be interrupted in Python, so at the limit the
process ends; only processes that are Ferrule's own have a limit, not programs that use `LLM`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from ferrule import log

__all__ = ["StartProgress", "waiting"]

_FIRST = 10.0  # seconds until the first line; the next come after twice, four times … as long
_LONGEST = 300.0  # seconds between two lines
_IMPORTS = "<frozen importlib"  # the import system's own frames, which every import has

_logger = log.get("start")


class StartProgress:
    """The progress of a part of the start. A time limit counts from the last step."""

    def __init__(self) -> None:
        self.moved = time.monotonic()
        self.last = ""

    def step(self, last: str) -> None:
        """Note progress; `last` is logged when the next step does not come."""
        self.moved, self.last = time.monotonic(), last


def give_up(text: str) -> NoReturn:
    """End this process, whatever its threads do."""
    log.flush()
    print(f"\nferrule: {text}\n", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def waiting(
    what: str, limit: float = 0.0, advice: str = "", first: float = _FIRST, end: Callable[[str], object] = give_up
) -> Iterator[StartProgress]:
    """Log that the server waits for `what`, when the block takes longer than `first` seconds, and again later.

    After `limit` seconds without a step, if it is not 0, `end` is called with a text about that and the `advice`.
    """
    progress, done = StartProgress(), threading.Event()
    arguments = (what, progress, done, threading.get_ident(), first)

    def watch() -> None:
        if _overdue(*arguments, limit):
            place = _place(arguments[3])
            end(f"{what[:1].upper()}{what[1:]} did not end within {limit:g} s{place}.{advice and chr(10)}{advice}")

    thread = threading.Thread(target=watch, name="waiting", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        _logger.warning("%s is waited for, however long it takes: %s", what, error)
    try:
        yield progress
    finally:
        done.set()


def _overdue(
    what: str, progress: StartProgress, done: threading.Event, thread: int, first: float, limit: float
) -> bool:
    """Log until `done`, and return False then; return True when the limit has passed."""
    began = time.monotonic()
    tell = began + first
    while True:
        until = min(tell, progress.moved + limit) if limit else tell
        if done.wait(max(0.0, until - time.monotonic())):
            return False
        now = time.monotonic()
        if limit and now >= progress.moved + limit:
            return True
        if now >= tell:
            fields = {"last": progress.last} if progress.last else {}
            _logger.info(f"waiting for {what}{_place(thread)}", seconds=round(now - began), **fields)
            tell = now + min(now - began, _LONGEST)


def _place(thread: int) -> str:
    """Return the place in a Python file at which a thread is, as a phrase."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(_IMPORTS):
        frame = frame.f_back
    return "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno}"
