"""Start the real server for a test, on a port of the loopback interface that is its own, and end it by its pid.

Nothing here takes for granted how fast the machine is: conditions are waited for, and a `Gate` holds the engine where a
test needs work to last. The limits are for what never comes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 240.0  # seconds that a test waits for what must come

# The server's limits for clients that are slow, as variables: on a busy machine every client is. And a small cache.
LIMITS = {
    "FERRULE_TEMPLATE_TIMEOUT": "120",
    "FERRULE_HEADER_TIMEOUT": "120",
    "FERRULE_BODY_TIMEOUT": "120",
    "FERRULE_KEEP_ALIVE_TIMEOUT": "120",
    "FERRULE_SHUTDOWN_TIMEOUT": "200",
    "FERRULE_CPU_KVCACHE_SPACE": "0.0625",  # GiB: all of it is written to at start
}

# Options of a server that makes its tokens up, for tests of what is around the model: it imports no torch and loads no
# weights, so it starts in a fraction of the time. The same seed gives the same tokens.
WITHOUT_MODEL = ("--distributed-executor-backend", "simulated")

# Options of a server with the routes of OpenAI's API, probes and figures alone: those of others are a quarter of the
# time in which its API process starts.
FEW_ROUTES = ("--routers", "openai", "health")

_GATED = """
import time
from pathlib import Path

from ferrule_plugins.policy.fcfs import FcfsPolicy

FILE = Path(__file__).with_suffix(".steps")


class Gated(FcfsPolicy):
    steps = 0

    def budget(self, running, waiting, limit):
        while (most := self.most(running + waiting)) is not None and self.steps >= most:
            time.sleep(0.002)
        self.steps = 0 if most is None else self.steps + 1
        return limit

    def most(self, requests):
        try:
            return int(FILE.read_text()) if requests else None
        except FileNotFoundError:
            return None
"""


class Gate:
    """A gate that holds a server's engine between two steps, for tests that need a request to last. `args` are for the
    server.
    """

    def __init__(self, folder: Path) -> None:
        policy = folder / "gated.py"
        policy.write_text(_GATED, encoding="utf-8")
        self._file = policy.with_suffix(".steps")
        self.args = ("--plugin", f"policy={policy}", "--scheduling-policy", policy.stem, "--watchdog-timeout", "900")

    @contextmanager
    def shut(self, after: int = 0) -> Iterator[None]:
        """Run `after` steps, and then none, for the length of a block, or until `open`."""
        new = self._file.with_suffix(".new")
        new.write_text(str(after), encoding="ascii")
        new.replace(self._file)
        try:
            yield
        finally:
            self.open()

    def open(self) -> None:
        self._file.unlink(missing_ok=True)


def until(holds: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Wait for a condition; return whether it came to hold within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(found)


@dataclass
class Server:
    """A running `ferrule serve`. `log` holds what it wrote to stderr and stdout."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def health(self) -> int:
        """Return the status of GET /health; 0 without a response."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait_healthy(self, timeout: float = PATIENCE) -> None:
        deadline = time.monotonic() + timeout
        while self.health() != 200:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}:\n{self.text()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not healthy after {timeout} s:\n{self.text()}")
            time.sleep(0.1)  # asking more often would slow down the server that starts

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def says(self, text: str, timeout: float = PATIENCE) -> bool:
        """Return whether the log comes to have `text`. Answers never wait for the log, so the text may come later than
        they do.
        """
        return until(lambda: text in self.text(), timeout)

    def taken(self) -> int:
        """Return how many requests have come as far as the engine's queue, by the log."""
        return self.text().count("frontend] request id=")

    def children(self) -> dict[str, int]:
        """Return the process ids of the server's processes by role, "engine" and "api"."""
        found = {}
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"ferrule.launch.child" in words:
                    found[words[words.index(b"ferrule.launch.child") + 1].decode()] = pid
        return found

    def stop(self, timeout: float = PATIENCE) -> int:
        """Send SIGTERM and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


def descendants(pid: int) -> list[int]:
    """Return the process ids of all processes below one."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, tasks.read_text(encoding="ascii").split()):
                found += [child, *descendants(child)]
    return found


@contextmanager
def own_port() -> Iterator[int]:
    """Reserve a port for the length of a block, for a server to listen on."""
    with socket.socket() as place:  # bound, so that it is taken, and not listening, so that it may be shared
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        yield int(place.getsockname()[1])


@contextmanager
def started(args: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run `ferrule serve ARGS` for the length of a block, which begins before the server is healthy."""
    with own_port() as port:
        command = [sys.executable, "-m", "ferrule", "serve", *args, "--host", "127.0.0.1", "--port", str(port)]
        around = {**LIMITS, **os.environ, **(env or {})}
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=around
            )
        server = Server(process, port, log)
        try:
            yield server
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.stop(60)
            process.kill()
            process.wait()


@contextmanager
def running(args: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run a healthy server for the length of a block."""
    with started(args, log, env) as server:
        server.wait_healthy()
        yield server
