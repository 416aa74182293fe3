"""The engine in another process: a ZeroMQ DEALER to its socket, and a pipe that ends when it dies."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import zmq

from ferrule.client.demux import DemuxClient
from ferrule.wire.board import Board
from ferrule.wire.engine_socket import HELLO
from ferrule.wire.messages import Call, FromEngine, ToEngine


class ProcessClient(DemuxClient):
    """`alive_fd` is the read end of a pipe whose only writer is the engine: its end is the engine's end."""

    def __init__(self, path: Path, alive_fd: int, board: Board | None = None, watchdog: float = 120.0) -> None:
        super().__init__(board, watchdog)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"api-%d" % self.board.row)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(f"ipc://{path}")
        self._alive_fd = alive_fd
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(alive_fd, self._on_engine_end)
        self._socket_fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._socket_fd, self._on_readable)
        self._greeter = self._loop.create_task(self._greet(), name="engine-greeter")

    async def _greet(self) -> None:
        """Say hello until the answer is there: the engine answers only once its model is loaded."""
        while not self._ready.is_set():
            self._post(Call(0, HELLO))
            self._on_readable()
            await asyncio.sleep(0.05)
        self._post(Call(0, "stats"))  # an engine sends its figures to those whom it has heard

    def _post(self, message: ToEngine) -> None:
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        # ZeroMQ's descriptor is edge-triggered: sending may consume the edge of a message that has just arrived.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._on_readable)

    def _on_readable(self) -> None:
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._dispatch(self._decoder.decode(frame))

    def _on_engine_end(self) -> None:
        if not os.read(self._alive_fd, 1):
            self._loop.remove_reader(self._alive_fd)
            self._on_readable()  # its last words, if there were any
            self.die("The engine process has ended.")

    async def close(self) -> None:
        self._greeter.cancel()
        if not self._socket.closed:
            self._loop.remove_reader(self._alive_fd)
            self._loop.remove_reader(self._socket_fd)
            self._socket.close()
            self._context.term()
        self.die("The engine client was closed.")
