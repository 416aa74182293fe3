"""Start the real server for a test, on a free port of the loopback interface, and end it by its pid."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


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
        """Status of GET /health; 0 when nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait_healthy(self, timeout: float = 90.0) -> None:
        deadline = time.monotonic() + timeout
        while self.health() != 200:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}:\n{self.text()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not healthy after {timeout} s:\n{self.text()}")
            time.sleep(0.05)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def says(self, text: str, timeout: float = 20.0) -> bool:
        """True once the log has `text`: it never blocks an answer, so it may come later."""
        deadline = time.monotonic() + timeout
        while text not in self.text() and time.monotonic() < deadline:
            time.sleep(0.05)
        return text in self.text()

    def children(self) -> dict[str, int]:
        """Pids of the server's processes by role, "engine" and "api"."""
        found = {}
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"ferrule.launch.child" in words:
                    found[words[words.index(b"ferrule.launch.child") + 1].decode()] = pid
        return found

    def stop(self, timeout: float = 40.0) -> int:
        """SIGTERM, then the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


def descendants(pid: int) -> list[int]:
    """Pids of all processes below one."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, tasks.read_text(encoding="ascii").split()):
                found += [child, *descendants(child)]
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start(args: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Server:
    """Start `ferrule serve ARGS`; the caller waits for it and ends it."""
    port = free_port()
    command = [sys.executable, "-m", "ferrule", "serve", *args, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}
        )
    return Server(process, port, log)


@contextlib.contextmanager
def running(args: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A healthy server for the length of a block."""
    server = start(args, log, env)
    try:
        server.wait_healthy()
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
                try:
                    server.process.wait(15)
                except subprocess.TimeoutExpired:
                    server.process.kill()
        server.process.wait()
