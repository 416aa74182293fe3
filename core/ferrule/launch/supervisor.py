"""The launcher: binds the port, starts the processes, and stops all of them when one ends.

It imports no torch and holds no state of a request. The first cause is kept: a server whose engine died
exits with a non-zero status, however it is stopped afterwards.
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
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from msgspec.structs import replace

from ferrule import log
from ferrule.config import Resolved
from ferrule.errors import ConfigError
from ferrule.launch.door import Door, accepts, has_door
from ferrule.launch.process import Boot, Child
from ferrule.plugin import Plugins
from ferrule.wire.board import BEAT, Board

_GRACE = 8.0  # seconds that children have to exit before they are killed
_TICK = 1.0  # seconds between two checks of the heartbeats
_PREFIX = "ferrule-"

# What mostly ends a process so.
_SIGNALS = {
    "SIGBUS": "a file that it was reading, such as one with weights, became shorter, or its disk failed",
    "SIGKILL": "the system may have no memory left",
}

_logger = log.get("launch")


def how(status: int) -> str:
    """What an exit status says, where it is negative by the name of its signal."""
    named = {each.value: each.name for each in signal.Signals}.get(-status)
    if named is None:
        return f"status={status}"
    told = f": {_SIGNALS[named]}" if named in _SIGNALS else ""
    return f"status={status} ({named}{told})"


def process_table(
    config: Resolved,
    plugins: Plugins,
    run_dir: Path,
    listen_fds: Sequence[int],
    pipe: tuple[int, int],
    door_fds: Sequence[int] = (-1,),
) -> list[Boot]:
    """What will run. API processes share one listening socket or have one each, and have one of the door's each, if
    there is a door; `pipe` is the engine's, to read and to write."""
    alive_read, alive_write = pipe
    path = str(run_dir / "engine-0.sock")
    engine = Boot(
        name="engine-0", role="engine", config=config, plugins=plugins, socket_path=path, alive_fd=alive_write
    )
    api = replace(engine, role="api", alive_fd=alive_read)
    return [engine] + [
        replace(
            api,
            name=f"api-{number}",
            row=number + 1,
            listen_fd=listen_fds[number % len(listen_fds)],
            door_fd=door_fds[number % len(door_fds)],
        )
        for number in range(config.frontend.api_server_count)
    ]


class Supervisor:
    """Starts the processes of the table and waits until all have ended. `run` is called on the main thread, once."""

    def __init__(
        self,
        config: Resolved,
        plugins: Plugins,
        listeners: Sequence[socket.socket],
        probe: socket.socket | None = None,
    ) -> None:
        self._config = config
        self._plugins = plugins
        self._listeners = listeners
        self._probe = probe
        self._events: queue.SimpleQueue[tuple[Child | None, int]] = queue.SimpleQueue()
        self._children: list[Child] = []  # in the order of the board's rows
        self._pulses: dict[
            int, tuple[float, int]
        ] = {}  # row -> its last heartbeat, and the number of ticks since it changed
        self._door: Door | None = None
        self._status = 0  # of the first failure; later ones do not change it

    def run(self) -> int:
        """Return the exit status: 0 only if no child failed and all ended on request."""
        run_dir = private_dir(self._config.env.rpc_base_path)
        board = Board.create(run_dir / "board", self._config.frontend.api_server_count)
        if has_door(self._config):
            listeners = self._listeners if accepts(self._config) else ()
            self._door = Door(self._config, self._plugins, board, run_dir, listeners, self._probe)
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._start(run_dir)
            self._watch(board)
        finally:
            self._stop()
            if self._door is not None:
                self._door.close()
            shutil.rmtree(run_dir, ignore_errors=True)
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._status

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put((None, number))

    def _start(self, run_dir: Path) -> None:
        pipe = os.pipe()
        fds = [listener.fileno() for listener in self._listeners]
        door_fds = [end.fileno() for end in self._door.far_ends] if self._door is not None else (-1,)
        try:
            for spec in process_table(self._config, self._plugins, run_dir, fds, pipe, door_fds):
                child = Child(spec)
                self._children.append(child)
                threading.Thread(target=self._wait, args=(child,), name=f"wait-{spec.name}", daemon=True).start()
        finally:
            for end in pipe:
                os.close(end)
            if not accepts(self._config):
                for listener in self._listeners:
                    listener.close()
        if self._door is not None:
            self._door.open()

    def _wait(self, child: Child) -> None:
        self._events.put((child, child.wait()))

    def _watch(self, board: Board) -> None:
        """Return when all processes must stop, or after a second signal. The first makes the API processes drain."""
        draining = False
        while True:
            try:
                child, number = self._events.get(timeout=_TICK)
            except queue.Empty:
                self._feel_pulses(board)
                continue
            if child is not None:
                if self._ended(child, number, draining):
                    return
            elif draining:
                _logger.warning("second signal, stopping now")
                for other in self._children:
                    other.kill()
                return
            else:
                draining = True
                if self._door is not None:
                    self._door.drain()
                for api in self._apis():
                    api.terminate()

    def _apis(self) -> list[Child]:
        """The API processes that run."""
        return [child for child in self._children if child.spec.role == "api" and child.poll() is None]

    def _ended(self, child: Child, status: int, draining: bool) -> bool:
        """Record that a child has ended; True if all others must stop."""
        is_api = child.spec.role == "api"
        expected = draining and is_api and status == 0
        if not expected and self._status == 0:
            self._status = status if 0 < status < 128 else 1
            if status != 1:  # with 1 the child has said why
                _logger.error("process ended unexpectedly name=%s pid=%d %s", child.spec.name, child.pid, how(status))
        if is_api:
            return not expected or not self._apis()
        # The engine is gone. The API processes send errors to their clients and then exit by themselves.
        if not self._config.env.keep_alive_on_engine_death:
            self._await_end(self._apis())
        return False

    def _feel_pulses(self, board: Board) -> None:
        """Kill a process whose heartbeat has not changed for longer than the watchdog's timeout.

        Ticks are counted, not seconds, so that a machine that was suspended does not look like processes that hang.
        """
        for row, child in enumerate(self._children):
            beat = board.get(BEAT, row)
            last, ticks = self._pulses.get(row, (beat, 0))
            self._pulses[row] = (beat, ticks + 1 if beat and beat == last else 0)
            if ticks * _TICK > self._config.parallel.watchdog_timeout and child.poll() is None:
                _logger.error("process does not respond, killing it name=%s pid=%d", child.spec.name, child.pid)
                child.kill()

    def _stop(self) -> None:
        """Stop all children that still run. API processes exit at once after a second signal, so two are sent."""
        for number in (signal.SIGTERM, signal.SIGINT):
            for child in self._children:
                child.terminate(number)
        self._await_end(self._children)

    def _await_end(self, children: Sequence[Child]) -> None:
        deadline = time.monotonic() + _GRACE
        for child in children:
            child.end(max(0.0, deadline - time.monotonic()))


def private_dir(base: str | None) -> Path:
    """A new folder for the sockets of this run, mode 0700. Folders left by runs that were killed are removed."""
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
