"""`--probe-port`: a thread of the launcher that answers the routes of the router `health`, whatever API processes do.

It is the API processes' own HTTP server and application, with one router and another service: the state is read off the
board, and figures from the files that the stat loggers of the API processes write beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from pathlib import Path
from typing import cast

import msgspec

from ferrule import log
from ferrule.api.app import build_app
from ferrule.api.lifecycle import Lifecycle
from ferrule.api.reload import Reloads
from ferrule.api.server import Front, HttpServer, loop_factory
from ferrule.config import Resolved
from ferrule.errors import UnavailableError
from ferrule.frontend.stat_loggers import Loggers, open_followers
from ferrule.hooks import HookRunner
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.service import Health, Service
from ferrule.interfaces.stats import HttpStats
from ferrule.shared_memory.board import LOAD, STATE, STATES, Board
from ferrule.types import ModelInfo

_MODEL = "model.msgpack"  # in the folder of the board
_FRESH = 1.0  # seconds for which figures are shown again
_DETAILS = {
    "dead": "The engine has stopped.",
    "draining": "The server is shutting down.",
    "starting": "The model is being loaded.",
}

_logger = log.get("launch")


class ProbeServer:
    """A server of health and metrics, made, started and closed on the launcher's main thread. Raises StartupError,
    PluginError.
    """

    def __init__(
        self,
        config: Resolved,
        plugins: Plugins,
        hooks: HookRunner,
        board: Board,
        folder: Path,
        listener: socket.socket,
    ) -> None:
        front = dataclasses.replace(
            config.frontend, routers=("health",), middleware=(), ssl_certfile=None, api_server_count=1
        )
        config = dataclasses.replace(config, frontend=front)
        lifecycle, reloads = _Lifecycle(board), Reloads()
        app = build_app(config, plugins, lifecycle, hooks, reloads)
        lifecycle.ready(cast(Service, BoardService(config, plugins, board, folder)))
        self._server = HttpServer(config, Front(lifecycle, app, None, reloads))
        self._listener = listener
        self._reloads = reloads
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)

    def start(self) -> None:
        _logger.info("probes are answered on port %d, without TLS", self._listener.getsockname()[1])
        self._thread.start()

    def reload(self, config: Resolved) -> None:
        """Use the API keys as they are now."""
        self._reloads.run(config)

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._listener), asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(self._server.serve(sockets=[self._listener]))


class _Lifecycle(Lifecycle):
    """The state of this thread, which has no row of the board; its load is the sum of the API processes'."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._of_all = board

    @property
    def load(self) -> int:
        return self._of_all.total(LOAD)


class BoardService:
    """The part of a `Service` that the router `health` and the HTTP server use. It has no other methods."""

    def __init__(self, config: Resolved, plugins: Plugins, board: Board, folder: Path) -> None:
        self._config, self._plugins, self._board, self._folder = config, plugins, board, folder
        self._loggers: Loggers | None = None
        self._shown: tuple[str, str] | None = None
        self._shown_at = 0.0  # a monotonic time

    def health(self) -> Health:
        """Return the server's state: the first of these that is true of an API process, or of the engine."""
        board = self._board
        states = {STATES[int(board.get(STATE, row))] for row in range(1, board.rows)}
        for state, detail in _DETAILS.items():
            if state in states:
                return Health(state=state, detail=detail)
        if stall := board.engine_stall(self._config.parallel.watchdog_timeout) or board.api_stall():
            return Health(state="stalled", detail=stall)
        return Health(state="ready" if board.ready else "starting")

    def exposition(self) -> tuple[str, str]:
        """Return the figures of the API processes, which may be a second old, as they are slow to collect.

        Raises UnavailableError, PluginError.
        """
        if self._loggers is None:
            self._loggers = self._open()
        now = time.monotonic()
        if self._shown is None or now - self._shown_at > _FRESH:
            self._shown, self._shown_at = self._loggers.exposition(), now
        return self._shown

    def _open(self) -> Loggers:
        try:
            info = msgspec.msgpack.decode((self._folder / _MODEL).read_bytes(), type=ModelInfo)
        except FileNotFoundError:
            raise UnavailableError("The model is being loaded.") from None
        loggers = open_followers(self._config, self._plugins, info, self._folder)
        if loggers is None:
            raise UnavailableError("A stat logger that is installed shows its figures on the main port only.")
        return loggers

    def answered(self, stats: HttpStats) -> None:
        """Ignore the call: the figures are those of the API processes."""

    def stalled(self, seconds: float) -> None:
        """Ignore the stall: the figures are those of the API processes."""


def tell_model(folder: Path, info: ModelInfo) -> None:
    """Write the served model's description beside the board, for the stat loggers of the probe server."""
    new = folder / f"{_MODEL}.new"
    new.write_bytes(msgspec.msgpack.encode(info))
    new.replace(folder / _MODEL)
