"""The launcher: binds the port, starts the processes, and ends them all when the first one ends.

It imports no torch and holds no state of a request. The first cause of an end is kept: a server whose engine died
exits non-zero however it is stopped afterwards.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
from pathlib import Path
from types import FrameType

from ferrule import log
from ferrule.config import Config
from ferrule.errors import ConfigError
from ferrule.launch.process import Boot, Child, ProcessSpec
from ferrule.plugin import PluginSet

_GRACE = 8.0  # seconds that a child gets to end by itself after another one died
_PREFIX = "ferrule-"

_logger = log.get("launch")


def process_table(config: Config, plugins: PluginSet, run_dir: Path, fds: tuple[int, int, int]) -> list[ProcessSpec]:
    """What will run. `fds` are the listening socket and the write and read ends of the engine's pipe."""
    listen_fd, alive_write, alive_read = fds
    path = str(run_dir / "engine-0.sock")
    engine = Boot(name="engine-0", config=config, plugins=plugins, socket_path=path, alive_fd=alive_write)
    api = Boot(name="api-0", config=config, plugins=plugins, socket_path=path, listen_fd=listen_fd, alive_fd=alive_read)
    return [ProcessSpec(engine.name, "engine", engine), ProcessSpec(api.name, "api", api)]


class Supervisor:
    """Starts the process table and sees it to its end. `run` is called on the main thread, once."""

    def __init__(self, config: Config, plugins: PluginSet, listener: socket.socket) -> None:
        self._config = config
        self._plugins = plugins
        self._listener = listener
        self._events: queue.SimpleQueue[tuple[Child | None, int]] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._status = 0  # the first cause, latched

    def run(self) -> int:
        """Return the exit status: 0 only when nothing failed and all children ended when asked to."""
        run_dir = private_dir(self._config.env.rpc_base_path)
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._start(run_dir)
            self._watch()
        finally:
            for child in self._children:
                child.terminate()
            for child in self._children:
                child.end(_GRACE)
            shutil.rmtree(run_dir, ignore_errors=True)
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._status

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put((None, number))

    def _start(self, run_dir: Path) -> None:
        alive_read, alive_write = os.pipe()
        fds = (self._listener.fileno(), alive_write, alive_read)
        try:
            for spec in process_table(self._config, self._plugins, run_dir, fds):
                child = Child(spec)
                self._children.append(child)
                threading.Thread(target=self._wait, args=(child,), name=f"wait-{spec.name}", daemon=True).start()
        finally:
            os.close(alive_read)
            os.close(alive_write)
            self._listener.close()

    def _wait(self, child: Child) -> None:
        self._events.put((child, child.wait()))

    def _watch(self) -> None:
        """Until a child ends or a second signal comes. The first signal lets the API process drain."""
        draining = False
        while True:
            child, number = self._events.get()
            if child is None:
                if draining:
                    _logger.warning("second signal, stopping now")
                    for other in self._children:
                        other.kill()
                    return
                draining = True
                self._api.terminate()
            elif self._ended(child, number, draining):
                return

    @property
    def _api(self) -> Child:
        return self._children[-1]

    def _ended(self, child: Child, status: int, draining: bool) -> bool:
        """Note a child's end; True when everything is to stop."""
        expected = draining and child is self._api and status == 0
        if not expected and self._status == 0:
            self._status = status if 0 < status < 128 else 1
            if status != 1:  # with 1 the child has said why
                _logger.error("process ended unexpectedly name=%s pid=%d status=%d", child.spec.name, child.pid, status)
        if child is self._api:
            return True
        # The engine is gone. The API process tells its clients and then ends by itself.
        if not self._config.env.keep_alive_on_engine_death:
            self._api.end(_GRACE)
        return False


def private_dir(base: str | None) -> Path:
    """A folder of this boot only, mode 0700. Folders whose owner is dead are removed."""
    root = Path(base or tempfile.gettempdir())
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
