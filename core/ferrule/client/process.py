"""The client of an engine in another process: a socket, and a lifeline that ends when the engine dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from ferrule import log
from ferrule.client.demux import DemuxClient
from ferrule.config import LimitsConfig
from ferrule.shared_memory.board import ENGINE_NUMBER, Board
from ferrule.wire import lifeline
from ferrule.wire.engine_socket import ClientSocket
from ferrule.wire.messages import Call, ToEngine

_POLL = 0.02  # seconds between two looks at the launcher's number of the next engine

_logger = log.get("client")


class ProcessClient(DemuxClient):
    """A client of an engine in another process.

    `path` is the socket of the first engine. With `restarts` the board tells when another one follows, and its number.
    """

    remote = True

    def __init__(
        self,
        path: Path,
        board: Board | None = None,
        watchdog: float = 120.0,
        restarts: bool = False,
        max_buffered: int = LimitsConfig.max_buffered_bytes,
    ) -> None:
        super().__init__(board, watchdog, restarts, max_buffered)
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._connect(0)

    def _connect(self, number: int) -> None:
        """Connect to the engine that was started as the `number`-th after the first one."""
        path = lifeline.socket_path(self._path, number)
        self._number = number
        self._alive_fd = lifeline.watch(path)
        self._socket: ClientSocket | None = ClientSocket(path, b"api-%d" % self.board.row)
        self._loop.add_reader(self._alive_fd, self._on_lifeline)
        self._loop.add_reader(self._socket.fd, self._on_readable)
        self._work(self._greet(self._socket), "engine-greeter")
        self._loop.call_soon(self._on_lifeline)  # it may have died already

    def _work(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start the client's one task. An exception of the task ends the client, as nothing else would notice a dead
        engine.
        """

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                _logger.error("the task %s failed: %r", name, task.exception())
                self.die("The connection to the engine has failed.")

        self._task = self._loop.create_task(work, name=name)
        self._task.add_done_callback(ended)

    def _disconnect(self) -> None:
        self._task.cancel()
        if self._socket is not None:
            self._loop.remove_reader(self._alive_fd)
            self._loop.remove_reader(self._socket.fd)
            os.close(self._alive_fd)
            self._socket.close()
            self._socket = None

    async def _greet(self, socket: ClientSocket) -> None:
        """Greet the engine until it answers, which it does once its model is loaded."""
        while not self._ready.is_set():
            socket.greet()
            self._on_readable()
            await asyncio.sleep(0.05)
        self._post(Call(0, "stats"))  # an engine sends its figures only to clients that have sent it a message

    def _post(self, message: ToEngine) -> None:
        if self._socket is not None and self._socket.send(message):
            self._loop.call_soon(self._on_readable)

    def _on_readable(self) -> None:
        if self._socket is not None:
            for message in self._socket.receive():
                self._dispatch(message)

    def _on_lifeline(self) -> None:
        if self._socket is None or not lifeline.has_ended(self._alive_fd):
            return
        self._on_readable()  # the engine's last messages, if there are any
        self._disconnect()
        if self._restarts:
            self.lose("The engine process has ended.")
            self._work(self._follow(), "next-engine")
        else:
            self.die("The engine process has ended.")

    async def _follow(self) -> None:
        """Connect to the next engine once the launcher has started it; end the client when there will be none."""
        while (number := int(self.board.get(ENGINE_NUMBER))) == self._number:
            await asyncio.sleep(_POLL)
        if number < 0:
            self.die("The engine process has ended.")
        else:
            self._connect(number)

    async def close(self) -> None:
        self._disconnect()
        self.die("The engine client was closed.")
