"""What a process of ours does with what it is started with: boot messages, streams, limits of the system."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
import sys

import pytest

from ferrule.errors import StartupError
from ferrule.launch import child, resources
from ferrule.launch.process import LENGTH_BYTES, MAX_BOOT_BYTES
from ferrule.launch.resources import as_startup_error, check_limits


class Pipe(io.BytesIO):
    """Gives no more than 64 KiB at once, as a pipe does."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size or 0, 1 << 16))


def message(payload: bytes, length: int | None = None) -> Pipe:
    stated = len(payload) if length is None else length
    return Pipe(stated.to_bytes(LENGTH_BYTES, "big") + payload)


def test_a_long_boot_message_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "Boot", dict)
    payload = b'{"a": "' + b"x" * 500_000 + b'"}'
    assert child.read_boot(message(payload)) == {"a": "x" * 500_000}


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (Pipe(), "ends 4 bytes early"),
        (message(b"{}", 1000), "ends 998 bytes early"),
        (message(b"{}", MAX_BOOT_BYTES + 1), "the largest that is read"),
        (message(b'{"name": 5}'), "cannot be read"),
    ],
)
def test_what_is_not_a_boot_message_is_one_sentence(stream: Pipe, says: str) -> None:
    with pytest.raises(StartupError, match=says):
        child.read_boot(stream)


@pytest.mark.parametrize("closed", ["", "<&-", ">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full", ">/dev/full"])
def test_streams_are_usable_whatever_they_were(closed: str, tmp_path: os.PathLike[str]) -> None:
    """A file that is opened afterwards never has the number of a stream, and what is printed raises nothing."""
    program = (
        "import sys, os; from ferrule.launch.streams import usable_streams; usable_streams();"
        "print('x' * 9999, file=sys.stderr, flush=True); sys.stdin.fileno(); sys.stdout.fileno();"
        f"file = open({str(tmp_path)!r} + '/file', 'w'); file.write(str(file.fileno()))"
    )
    shell = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program]
    done = subprocess.run(shell, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == 0
    with open(os.path.join(tmp_path, "file"), encoding="ascii") as file:
        assert int(file.read()) > 2


def test_a_thread_that_does_not_end_does_not_keep_the_process() -> None:
    program = (
        "import threading, ferrule.launch.streams as s; s._GRACE = 0.2;"
        "threading.Thread(target=threading.Event().wait).start(); s.Exit().leave(7)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 7


def test_an_exit_runs_what_was_registered_and_ends_there() -> None:
    """Output arrives, and the interpreter is not taken down: a daemon thread in C++ would abort the process."""
    program = (
        "import atexit, ferrule.launch.streams as s\n"
        "end = s.Exit()\n"
        "class Kept:\n"
        "    def __del__(self): print('taken down', flush=True)\n"
        "kept = Kept()\n"
        "atexit.register(print, 'registered')\n"
        "print('said', end=' ')\n"
        "end.leave(7)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "said registered\n", "")


def test_few_files_are_told_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.resource, "getrlimit", lambda number: (16, 1024))
    with pytest.raises(StartupError, match=r"16 files at once \(ulimit -n\)"):
        check_limits()
    monkeypatch.setattr(resources.resource, "getrlimit", lambda number: (resource.RLIM_INFINITY,) * 2)
    check_limits()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "not enough memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "not enough memory"),
        (RuntimeError("can't start new thread"), "No thread"),
        (OSError(errno.EMFILE, "Too many open files", "/tmp/board"), "Too many files are open: /tmp/board"),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), "/tmp/x: No space left"),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "No process"),
        (OSError(errno.ENOENT, "No such file"), None),
        (RuntimeError("something else"), None),
        (ValueError("x"), None),
    ],
)
def test_what_the_system_lacks_is_one_block(error: Exception, says: str | None) -> None:
    told = as_startup_error(error)
    assert (told is None) == (says is None)
    assert says is None or says in str(told)
