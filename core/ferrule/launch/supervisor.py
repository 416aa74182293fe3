"""The launcher, which binds the port, starts the processes, and stops all of them when one ends.

It imports no torch and holds no state of a request. An engine that dies may be started again (`Restarts`). The first
cause is kept: a server whose engine died for good exits with status 1, however it is stopped afterwards.
"""

from __future__ import annotations

import dataclasses
import queue
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ferrule import log
from ferrule.config import Resolved
from ferrule.errors import ConfigError
from ferrule.hooks import HookRunner
from ferrule.launch.group import kill_group
from ferrule.launch.prepare import reload_log
from ferrule.launch.process import ChildProcess, private_dir, process_table, start_engine
from ferrule.launch.reload import Reloader, tell
from ferrule.launch.resources import memory_limits
from ferrule.launch.restarts import Restarts
from ferrule.plugin import Plugins
from ferrule.shared_memory.board import BEAT, ENGINE_NUMBER, Board
from ferrule.wire import lifeline

if TYPE_CHECKING:
    from ferrule.launch.probe_server import ProbeServer

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)

_GRACE = 8.0  # seconds that children have to exit before they are killed
_SHORT_GRACE = 1.5  # the same after a second signal, and before there was anything to lose
_TICK = 1.0  # seconds between two checks of the heartbeats
_SAID = (1, 2)  # exit statuses with which a child has logged the reason

# The usual causes of an end by these signals.
_SIGNALS = {
    "SIGBUS": "a file that it was reading, such as one with weights, became shorter, or its disk failed",
    "SIGKILL": "the system may have no memory left",
}

_logger = log.get("launch")


def how(status: int) -> str:
    """Describe an exit status; a negative one by the name of its signal."""
    named = {each.value: each.name for each in signal.Signals}.get(-status)
    if named is None:
        return f"status={status}"
    told = f": {_SIGNALS[named]}" if named in _SIGNALS else ""
    return f"status={status} ({named}{told})"


def _as_asked(status: int) -> bool:
    """Return whether an exit status is that of a process that was asked to stop, maybe before it handled that
    signal.
    """
    return status in (0, -signal.SIGTERM) or status > 128


class Supervisor:
    """A parent of the processes in the table, which starts them and waits until all have ended. `run` is called once,
    on the main thread.
    """

    def __init__(
        self,
        config: Resolved,
        plugins: Plugins,
        listener: socket.socket,
        reloader: Reloader,
        hooks: HookRunner,
        probe: socket.socket | None = None,
    ) -> None:
        self._config = config
        self._reloader = reloader
        self._plugins = plugins
        self._listener = listener
        self._hooks = hooks
        self._probe = probe
        self._events: queue.SimpleQueue[tuple[ChildProcess | None, int]] = queue.SimpleQueue()
        self._children: list[ChildProcess] = []  # in the order of the board's rows: the engine, the API processes
        self._pulses: dict[
            int, tuple[float, int]
        ] = {}  # row -> its last heartbeat, and the number of ticks since it changed
        self._restarts = Restarts(config.parallel.engine_restarts)
        self._serving_since: float | None = None  # the engine, by its first heartbeat
        self._pause: int | None = None  # ticks until the engine that has died is started again
        self._asked = self._insisted = 0  # signals that asked to stop
        self._was_ready = False  # when it was asked to stop
        self._deadline: float | None = None  # for API processes to send errors, once no engine will follow
        self._probes: ProbeServer | None = None
        self._status = 0  # since the first failure: 1, or the status of the child

    def run(self) -> int:
        """Start the processes, wait for their end, and return the exit status.

        The status is 1 after a failure, 2 where a child reports a wrong option, 0 when the server was stopped and
        drained, and 128 + the signal when it was stopped before it was ready, or a second signal cut the drain short.
        """
        run_dir = private_dir(self._config.env.rpc_base_path)
        self._board = Board.create(run_dir / "board", self._config.frontend.api_server_count)
        previous = {number: signal.signal(number, self._on_signal) for number in (*STOPS, signal.SIGHUP)}
        try:
            self._start(run_dir)
            self._watch()
        finally:
            self._stop()
            if self._probes is not None:
                self._probes.close()
            shutil.rmtree(run_dir, ignore_errors=True)
            for number, handler in previous.items():
                signal.signal(number, handler)
        cut_short = self._insisted or (self._asked if not self._was_ready else 0)
        return self._status or (128 + cut_short if cut_short else 0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put((None, number))

    def _start(self, run_dir: Path) -> None:
        with self._listener:
            engine, *apis = process_table(self._config, self._plugins, run_dir, self._listener.fileno())
            self._first = engine
            self._add(0, start_engine(engine))
            for row, spec in enumerate(apis, 1):
                self._add(row, ChildProcess(spec))
        if self._probe is not None:
            from ferrule.launch.probe_server import ProbeServer  # imports the HTTP server, which few launchers need

            self._probes = ProbeServer(self._config, self._plugins, self._hooks, self._board, run_dir, self._probe)
            self._probes.start()

    def _add(self, row: int, child: ChildProcess) -> None:
        self._children[row : row + 1] = [child]
        threading.Thread(target=self._wait, args=(child,), name=f"wait-{child.spec.name}", daemon=True).start()

    def _wait(self, child: ChildProcess) -> None:
        self._events.put((child, child.wait()))

    def _watch(self) -> None:
        """Return when all processes must stop. The first signal makes the API processes drain, the second ends the
        drain.
        """
        while self._deadline is None or time.monotonic() < self._deadline:
            try:
                child, number = self._events.get(timeout=_TICK)
            except queue.Empty:
                self._feel_pulses()
                self._tick()
                continue
            if child is None and number == signal.SIGHUP:
                self._reload()
            elif child is None:
                if self._asked:
                    _logger.warning("second signal, stopping now")
                    self._insisted = number
                    return
                self._drain(number)
                if not (self._was_ready or self._status):  # nothing runs that could be drained
                    return
            elif child.spec.role == "engine":
                self._engine_ended(child, number)
            elif self._api_ended(child, number):
                return

    def _drain(self, number: int) -> None:
        self._asked, self._was_ready = number, self._board.ready
        if self._pause is not None or (self._restarts.in_a_row and not self._board.get(BEAT)):
            self._status = 1  # an engine has died, and no other one has taken its place
            self._engine_is_gone()
        for api in self._apis():
            api.terminate()

    def _reload(self) -> None:
        """Pass changed options to the processes that serve; an engine that is started later gets them at its start."""
        if self._asked:
            return
        try:
            self._config = self._reloader.read(self._config)
            reload_log(self._config)
        except ConfigError as error:
            _logger.error("SIGHUP: nothing is reloaded: %s", error)
            return
        self._first = replace(self._first, config=self._config)
        tell(Path(self._first.socket_path).parent, self._config)
        if self._probes is not None:
            self._probes.reload(self._config)
        for row, child in enumerate(self._children):
            if self._board.get(BEAT, row):  # a process that has a heartbeat handles the signal
                child.terminate(signal.SIGHUP)

    def _apis(self) -> list[ChildProcess]:
        """Return the API processes that run."""
        return [child for child in self._children[1:] if child.poll() is None]

    def _fail(self, child: ChildProcess, status: int) -> None:
        if self._status == 0:
            self._status = status if status in _SAID else 1
            self._log_end(child, status)

    def _log_end(self, child: ChildProcess, status: int) -> None:
        if status not in _SAID:
            _logger.error("process ended unexpectedly name=%s pid=%d %s", child.spec.name, child.pid, how(status))
            if limits := memory_limits():
                _logger.error("%s", limits)

    def _api_ended(self, child: ChildProcess, status: int) -> bool:
        """Record that an API process has ended. Returns True if all others must stop."""
        expected = self._deadline is not None or (self._asked and _as_asked(status))
        if not expected:
            self._fail(child, status)
        return not expected or not self._apis()

    # ---------------------------------------------------------------------------------------- the engine

    def _engine_ended(self, child: ChildProcess, status: int) -> None:
        """Plan the next start of the engine, or let the API processes send errors to their clients and exit."""
        pause = None if self._asked else self._restarts.pause(self._served_for())
        self._serving_since = None
        self._pulses.pop(0, None)
        self._board.engine_ended()
        if pause is None:
            if self._restarts.in_a_row and not self._asked:
                _logger.error("the engine has died after %d restarts: it is not started again", self._restarts.in_a_row)
            self._fail(child, status)
            self._engine_is_gone()
            return
        self._log_end(child, status)
        counts = {"restart": self._restarts.in_a_row, "of": self._restarts.most}
        _logger.warning("the engine has died and is started again", in_seconds=pause, **counts)
        self._pause = pause
        kill_group(child.pid)

    def _served_for(self) -> float | None:
        if not self._board.get(BEAT):
            return None
        return 0.0 if self._serving_since is None else time.monotonic() - self._serving_since

    def _engine_is_gone(self) -> None:
        """Tell the API processes that no engine will follow."""
        self._pause = None
        self._board.put(ENGINE_NUMBER, -1.0)
        if not self._config.env.keep_alive_on_engine_death:
            self._deadline = time.monotonic() + _GRACE

    def _tick(self) -> None:
        """Start the next engine when its time has come and the workers of the dead one are gone, with their memory."""
        if self._pause is None:
            return
        self._pause -= 1
        if self._pause > 0:
            return
        if kill_group(self._children[0].pid):
            self._pause = None
            number = self._board.get(ENGINE_NUMBER) + 1
            path = lifeline.socket_path(Path(self._first.socket_path), int(number))
            # What is wrong with an adapter by now concerns the requests that name it, and not the start.
            lora = dataclasses.replace(self._config.lora, modules=())
            config = dataclasses.replace(self._config, lora=lora)
            self._add(0, start_engine(replace(self._first, socket_path=str(path), config=config)))
            self._board.put(ENGINE_NUMBER, number)
        elif self._pause * _TICK < -_GRACE:
            _logger.error("processes of the dead engine do not end: it is not started again")
            self._status = 1
            self._engine_is_gone()

    def _feel_pulses(self) -> None:
        """Kill a process whose heartbeat has not changed for longer than the watchdog's timeout.

        Ticks are counted, not seconds, so that a machine that was suspended does not look like processes that hang.
        """
        for row, child in enumerate(self._children):
            beat = self._board.get(BEAT, row)
            if beat and row == 0 and self._serving_since is None:
                self._serving_since = time.monotonic()
            last, ticks = self._pulses.get(row, (beat, 0))
            self._pulses[row] = (beat, ticks + 1 if beat and beat == last else 0)
            if ticks * _TICK > self._config.parallel.watchdog_timeout and child.poll() is None:
                _logger.error("process does not respond, killing it name=%s pid=%d", child.spec.name, child.pid)
                child.kill()

    def _stop(self) -> None:
        """Stop all children that still run. API processes exit at once after a second signal, so two are sent.

        A child that has to be killed for that is not a failure; one that ends in another unexpected way is.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            for child in self._children:
                child.terminate(number)
        hurry = self._insisted or (self._asked and not self._was_ready)
        deadline = time.monotonic() + (_SHORT_GRACE if hurry else _GRACE)
        for child in self._children:
            status = child.end(max(0.0, deadline - time.monotonic()))
            if status != -signal.SIGKILL and not _as_asked(status):
                self._fail(child, status)
