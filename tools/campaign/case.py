"""One start of ``ferrule serve`` with something wrong around it, and what it came to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ferrule_testkit.server import descendants, own_port

SERVES = ""  # `Case.says` of a start that must come to serve
LINES = 20  # of what a start that fails writes, at most: the log's, and the block at its end
_POLL = 0.2
_END = 20.0  # seconds from SIGTERM to the exit
_BODY = json.dumps({"prompt": "Hello", "max_tokens": 4}).encode()


@dataclass(frozen=True)
class Case:
    """A start to try. `prepare` writes into an empty folder and returns arguments; `shell` runs the command, which is
    ``"$@"`` there.

    `says` is a regular expression for what a start that must fail writes.
    """

    name: str
    says: str = SERVES
    prepare: Callable[[Path], Sequence[str]] = lambda folder: ()
    env: Mapping[str, str] = field(default_factory=dict)
    shell: str = 'exec "$@"'
    limits: Mapping[int, int] = field(default_factory=dict)  # resource → value, for launcher and children
    seconds: float = 60.0  # in which it must end, or serve
    silent: bool = False  # what it writes cannot be read: its status alone counts


@dataclass(frozen=True)
class Result:
    """The result of a case. `problem` is empty if it ended as it must."""

    problem: str
    seconds: float
    text: str


def run(case: Case, folder: Path) -> Result:
    """Start, wait for what it comes to, and end it. `folder` is empty."""
    args, log = case.prepare(folder), folder / "log"
    with own_port() as port, log.open("wb") as sink:
        command = [sys.executable, "-m", "ferrule", "serve", *args, "--host", "127.0.0.1", "--port", str(port)]
        command.append("--disable-uvicorn-access-log")  # of the questions whether it is healthy

        def limit() -> None:
            for number, value in case.limits.items():
                resource.setrlimit(number, (value, value))

        began = time.monotonic()
        process = subprocess.Popen(
            ["/bin/sh", "-c", case.shell, "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **case.env},
            preexec_fn=limit,
        )
        try:
            problem = _come_to(case, process, f"http://127.0.0.1:{port}", log)
            seconds = time.monotonic() - began
        finally:
            left = [process.pid, *descendants(process.pid)] if process.poll() is None else []
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    return Result(problem, seconds, log.read_text(encoding="utf-8", errors="replace"))


def _come_to(case: Case, process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    deadline = time.monotonic() + case.seconds
    while process.poll() is None and time.monotonic() < deadline:
        if _status(f"{url}/health") == 200:
            return _served(process, url) if case.says == SERVES else "it serves"
        time.sleep(_POLL)
    if process.returncode is None:
        return f"after {case.seconds:.0f} s it neither serves nor has ended"
    if case.says == SERVES:
        return f"it ended with status {process.returncode}"
    return _ended(case, process.returncode, log.read_text(encoding="utf-8", errors="replace"))


def _served(process: subprocess.Popen[bytes], url: str) -> str:
    if (status := _status(f"{url}/v1/completions", _BODY)) != 200:
        return f"a completion is answered {status}"
    process.terminate()
    try:
        status = process.wait(_END)
    except subprocess.TimeoutExpired:
        return f"it runs {_END:.0f} s after SIGTERM"
    return f"it ended with status {status} after SIGTERM" if status else ""


def _ended(case: Case, status: int, text: str) -> str:
    if status not in (1, 2):
        return f"it ended with status {status}"
    if case.silent:
        return ""
    if "Traceback" in text:
        return "there is a traceback"
    if (lines := text.count("\n")) > LINES:
        return f"it wrote {lines} lines"
    return "" if re.search(case.says, text) else f"it did not say {case.says!r}"


def _status(url: str, body: bytes | None = None) -> int:
    """Return the status of the answer; 0 without one."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
