"""The standard streams of a process, made usable whatever they are: closed, or on a disk that is full."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
import time
from typing import NoReturn

_GRACE = 5.0  # seconds that threads which are not daemons have to end
_ENCODING = "utf-8"


class _Forgiving(io.TextIOWrapper):
    """A text stream that drops text that cannot be written: a failed log line must not end the process."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def usable_streams() -> None:
    """Open standard streams that are closed, so that no socket gets their numbers; stderr then never raises.

    Streams that were replaced, for example by a test, stay.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding=_ENCODING, closefd=False)  # noqa: SIM115 for as long as the process lives
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding=_ENCODING, closefd=False)  # noqa: SIM115
    if sys.stderr is sys.__stderr__:
        raw = open(2, "wb", buffering=0, closefd=False)  # noqa: SIM115
        sys.stderr = _Forgiving(raw, _ENCODING, "backslashreplace", write_through=True)


def leave(status: int) -> NoReturn:
    """Exit. Threads of a plugin that do not end keep the process alive for no more than some seconds."""

    def insist() -> None:
        time.sleep(_GRACE)
        os._exit(status)

    with contextlib.suppress(RuntimeError):  # no thread can be started: then the exit has no limit of time
        threading.Thread(target=insist, name="leave", daemon=True).start()
    sys.exit(status)


class Exit:
    """The end of a program. It is made before anything is registered with `atexit`, so that its own handler runs
    last.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        atexit.register(self._end)

    def leave(self, status: int) -> NoReturn:
        """Exit as `leave` does, but without finalizing the interpreter."""
        self._status = status
        leave(status)

    def _end(self) -> None:
        """Exit without finalizing the interpreter: with a daemon thread in C++ that would abort the process."""
        if self._status is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._status)
