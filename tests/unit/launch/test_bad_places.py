"""What a process of ours does with what it is started with: boot messages, streams, limits of the system."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
import sys

import pytest

from ferrule.errors import PluginError, StartupError
from ferrule.launch import child, resources
from ferrule.launch.process import LENGTH_BYTES, MAX_BOOT_BYTES
from ferrule.launch.resources import as_startup_error, check_limits


class Pipe(io.BytesIO):
    """A file that returns no more than 64 KiB at once, as a pipe does."""

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
    """Give a file that is opened afterwards never the number of a stream, and raise nothing for what is printed."""
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
    """Write all output without taking the interpreter down: a daemon thread in C++ would abort the process."""
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
        (ImportError("libx.so: failed to map segment from shared object"), "not enough memory"),
        (ImportError("no module named 'x'"), None),
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


_LIMITED = """
import resource, sys
size = int(sys.argv[2]) * 1024
resource.setrlimit(getattr(resource, sys.argv[1]), (size, size))
{program}
"""


def limited(kind: str, kib: int, program: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _LIMITED.format(program=program), kind, str(kib), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(("kind", "kib", "option"), [("RLIMIT_DATA", 150_000, "-d"), ("RLIMIT_AS", 300_000, "-v")])
def test_a_server_without_memory_names_the_limit_and_exits(kind: str, kib: int, option: str) -> None:
    serve = "from ferrule.launch.cli import main; sys.argv[1:] = ['serve', '--port', '0']; main()"
    done = limited(kind, kib, serve)
    assert done.returncode == 1
    assert f"{kib} KiB of memory (ulimit {option}); an engine needs" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("kind", "kib", "option"), [("RLIMIT_DATA", 165_000, "-d"), ("RLIMIT_AS", 560_000, "-v")])
def test_libraries_that_do_not_get_memory_end_a_process_with_the_limit(kind: str, kib: int, option: str) -> None:
    """Lack memory as an engine's process does, after the launcher's check."""
    program = """
from ferrule.env import before_numpy
before_numpy()
import numpy
from ferrule.launch.child import report
from ferrule.launch.resources import as_startup_error
from ferrule.plugin import discover
try:
    discover().load("executor", "uni")
except Exception as error:
    report(as_startup_error(error) or error)
"""
    done = limited(kind, kib, program)
    assert f"A limit on memory may be the reason: ulimit {option} is {kib}." in done.stderr or done.returncode < 0
    assert "Traceback" not in done.stderr


def test_a_plugin_that_fails_under_a_limit_is_told_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PluginError("Plugin x cannot be imported: SystemError", "See why.")
    error.__cause__ = SystemError()
    limits = {resource.RLIMIT_AS: (1 << 30, 1 << 31)}
    monkeypatch.setattr(
        resources.resource, "getrlimit", lambda number: limits.get(number, (resource.RLIM_INFINITY,) * 2)
    )
    assert str(as_startup_error(error)) == f"{error}\nA limit on memory may be the reason: ulimit -v is 1048576."
    resources.check_memory()
    limits.clear()
    assert as_startup_error(error) is None
    limits[resource.RLIMIT_DATA] = (1 << 20, resource.RLIM_INFINITY)
    with pytest.raises(StartupError, match="1024 KiB of memory .ulimit -d.; an engine needs 262144") as caught:
        resources.check_memory()
    assert "the highest that is allowed here is unlimited" in caught.value.hint


def test_last_words_are_written_where_no_thread_can_start() -> None:
    program = """
import threading
from ferrule import log
def start(self): raise RuntimeError("can't start new thread")
threading.Thread.start = start
log.last_words("the end" + "x" * 100_000)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr[:7]) == (0, "the end")
