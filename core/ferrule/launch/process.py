"""Processes as data: the role of a child, the values that it is given, and how it is watched.

A child is ``python -m ferrule.launch.child ROLE``. Its boot message comes through standard input, which stays open: its
end means that the parent has died, and the child exits at once. Any role can therefore be run in the foreground by
hand, with a boot message from a file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ferrule import log
from ferrule.config import Resolved
from ferrule.errors import ConfigError, StartupError
from ferrule.plugin import Plugins
from ferrule.shared_memory.board import ENGINE, Board
from ferrule.wire import lifeline

LENGTH_BYTES = 4  # bytes of the length before a boot message, big-endian
MAX_BOOT_BYTES = 256 << 20  # of a boot message; one of 50,000 plugins has 15 MiB

_PREFIX = "ferrule-"  # of the folders of runs

_logger = log.get("launch")


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the process table, and the values that its process is given. Descriptors are inherited; -1 stands for
    none.
    """

    name: str  # "engine-0", "api-0", "api-1", …
    role: str  # the argument of `ferrule.launch.child`
    config: Resolved
    plugins: Plugins
    socket_path: str  # engine: its own; API: the first engine's. The board is beside it
    row: int = ENGINE  # on the board
    listen_fd: int = -1  # the HTTP socket, already bound; all API processes have it
    alive_fd: int = -1  # engine: its end of the lifeline
    cache_root: bytes = b""  # engine: random per start, and the same for all engines

    @property
    def inherited(self) -> tuple[int, ...]:
        return tuple(fd for fd in (self.listen_fd, self.alive_fd) if fd >= 0)

    def board(self) -> Board:
        return Board(Path(self.socket_path).with_name("board"), self.row)


class ChildProcess:
    """A started process. Only its own recorded pid is ever signalled."""

    def __init__(self, spec: Boot) -> None:
        self.spec = spec
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ferrule.launch.child", spec.role],
            stdin=subprocess.PIPE,
            pass_fds=spec.inherited,
            # Not the terminal's group: its Ctrl-C reaches the launcher alone, which then drains. But the launcher's
            # session: Linux may share processors among sessions first (autogroup), and probes would wait for a share.
            process_group=0,
        )
        self.pid = self._process.pid
        payload = msgspec.json.encode(spec)
        if self._process.stdin is None:
            raise StartupError(f"Process {spec.name} has no standard input.")
        try:
            self._process.stdin.write(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
            self._process.stdin.flush()
        except BrokenPipeError:
            _logger.error("process ended before it started name=%s", spec.name)

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Block until the process ends, and return its exit status."""
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def terminate(self, number: int = signal.SIGTERM) -> None:
        """Ask the process to end; nothing happens when it already has."""
        if self.poll() is None:
            self._process.send_signal(number)

    def end(self, grace: float) -> int:
        """Wait `grace` seconds, then kill. Returns the exit status."""
        try:
            return self._process.wait(grace)
        except subprocess.TimeoutExpired:
            _logger.warning("process does not stop, killing it name=%s pid=%d", self.spec.name, self.pid)
            self._process.kill()
            return self._process.wait()


def process_table(config: Resolved, plugins: Plugins, run_dir: Path, listen_fd: int = -1) -> list[Boot]:
    """Return the processes to run: the engine, and the API processes, which share the listening socket."""
    path = str(run_dir / "engine-0.sock")
    root = os.urandom(32)
    engine = Boot(name="engine-0", role="engine", config=config, plugins=plugins, socket_path=path, cache_root=root)
    api = replace(engine, role="api", cache_root=b"")
    return [engine] + [
        replace(api, name=f"api-{number}", row=number + 1, listen_fd=listen_fd)
        for number in range(config.frontend.api_server_count)
    ]


def start_engine(spec: Boot) -> ChildProcess:
    """Start an engine with its lifeline."""
    alive = lifeline.hold(Path(spec.socket_path))
    try:
        return ChildProcess(replace(spec, alive_fd=alive))
    finally:
        os.close(alive)


def private_dir(base: str | None) -> Path:
    """Create a folder for the sockets of this run, mode 0700. Folders left by runs that were killed are removed.

    Raises ConfigError.
    """
    try:
        root = Path(base or tempfile.gettempdir())
    except FileNotFoundError:
        raise ConfigError(
            "There is no folder for temporary files that can be written.",
            "Set TMPDIR to one, or FERRULE_RPC_BASE_PATH to a folder for the sockets between processes.",
        ) from None
    for stale in root.glob(f"{_PREFIX}[0-9]*-*"):
        owner = stale.name.split("-")[1]
        if owner.isdigit() and not _is_running(int(owner)):
            shutil.rmtree(stale, ignore_errors=True)
    try:
        return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
    except OSError as error:
        raise ConfigError(
            f"Cannot create a folder for sockets in {root}: {error.strerror}.", "Set FERRULE_RPC_BASE_PATH."
        ) from None


def _is_running(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, 0)
        return True
    return Path(f"/proc/{pid}").exists()
