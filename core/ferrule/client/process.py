"""The engine in another process: a client of its socket, and a pipe that ends when it dies."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ferrule.client.demux import DemuxClient
from ferrule.config import LimitsConfig
from ferrule.wire.board import Board
from ferrule.wire.engine_socket import ClientSocket
from ferrule.wire.messages import Call, ToEngine


class ProcessClient(DemuxClient):
    """`alive_fd` is the read end of a pipe whose only writer is the engine: its end is the engine's end."""

    remote = True

    def __init__(
        self,
        path: Path,
        alive_fd: int,
        board: Board | None = None,
        watchdog: float = 120.0,
        max_buffered: int = LimitsConfig.max_buffered_bytes,
    ) -> None:
        super().__init__(board, watchdog, max_buffered)
        self._socket: ClientSocket | None = ClientSocket(path, b"api-%d" % self.board.row)
        self._alive_fd = alive_fd
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(alive_fd, self._on_engine_end)
        self._loop.add_reader(self._socket.fd, self._on_readable)
        self._greeter = self._loop.create_task(self._greet(self._socket), name="engine-greeter")

    async def _greet(self, socket: ClientSocket) -> None:
        """Greet until the engine answers, which it does once its model is loaded."""
        while not self._ready.is_set():
            socket.greet()
            self._on_readable()
            await asyncio.sleep(0.05)
        self._post(Call(0, "stats"))  # an engine sends its figures to those that it has heard from

    def _post(self, message: ToEngine) -> None:
        if self._socket is not None and self._socket.send(message):
            self._loop.call_soon(self._on_readable)

    def _on_readable(self) -> None:
        if self._socket is not None:
            for message in self._socket.receive():
                self._dispatch(message)

    def _on_engine_end(self) -> None:
        if not os.read(self._alive_fd, 1):
            self._loop.remove_reader(self._alive_fd)
            self._on_readable()  # its last words, if there were any
            self.die("The engine process has ended.")

    async def close(self) -> None:
        self._greeter.cancel()
        if self._socket is not None:
            self._loop.remove_reader(self._alive_fd)
            self._loop.remove_reader(self._socket.fd)
            self._socket.close()
            self._socket = None
        self.die("The engine client was closed.")
