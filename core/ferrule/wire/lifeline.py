"""A process's lifeline: a named pipe that it alone keeps open to write, so that its readers see the process end.

The launcher makes the pipe before it starts the process, and the process inherits the end to write. A reader may come
at any time, also after the end: the pipe has then no writer, which reading tells.
"""

from __future__ import annotations

import os
from pathlib import Path


def socket_path(first: Path, number: int) -> Path:
    """Return the socket of the engine that was started as the `number`-th after the first one, whose own path is
    `first`.

    No two engines share one: no message to a dead engine can reach the next.
    """
    return first.with_stem(f"{first.stem}-{number}") if number else first


def hold(path: Path) -> int:
    """Create the pipe beside an engine's socket. Returns the end to write, for the engine to inherit."""
    pipe = path.with_suffix(".alive")
    os.mkfifo(pipe, 0o600)
    return os.open(pipe, os.O_RDWR)  # with O_WRONLY alone it would wait for a reader


def watch(path: Path) -> int:
    """Open the end to read, which becomes readable when the process ends, unless it had ended before. See
    `has_ended`.
    """
    return os.open(path.with_suffix(".alive"), os.O_RDONLY | os.O_NONBLOCK)


def has_ended(fd: int) -> bool:
    """Return whether the process has ended; it never writes."""
    try:
        return not os.read(fd, 1)
    except BlockingIOError:
        return False
