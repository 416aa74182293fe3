"""The engine's socket: msgpack frames over a ZeroMQ ROUTER on a private Unix socket, a closed set of types.

The engine binds before it loads anything, so that clients may connect and greet at any time; a client greets by
calling ``hello`` and is answered with `Ready` once the model is loaded.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import zmq

from ferrule import log
from ferrule.errors import StartupError
from ferrule.wire.messages import Call, FromEngine, Ready, ToEngine

HELLO = "hello"

_logger = log.get("engine")


class EngineSocket:
    """The engine's end. Owned by the thread that runs the loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a slow client must never block the loop or lose a token
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            raise StartupError(f"Cannot create the engine's socket in {path.parent}: {error.strerror}.") from error
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self.ready: Ready | None = None

    def receive(self, timeout: float) -> list[tuple[bytes, ToEngine]]:
        """Messages that have arrived; waits up to `timeout` seconds for the first. Foreign frames are dropped."""
        messages: list[tuple[bytes, ToEngine]] = []
        if timeout > 0 and not self._socket.poll(int(timeout * 1000) or 1):
            return messages
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                message = self._decoder.decode(frames[-1])
            except msgspec.DecodeError:  # ValidationError included
                _logger.warning("dropped a frame that is not a message, bytes=%d", len(frames[-1]))
                continue
            if isinstance(message, Call) and message.name == HELLO:
                if self.ready is not None:
                    self.send(frames[0], self.ready)
                continue
            messages.append((frames[0], message))

    def send(self, client: bytes, message: FromEngine) -> None:
        """Queue a message; one for a client that has gone is dropped by the socket."""
        self._socket.send_multipart([client, self._encoder.encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._path.unlink(missing_ok=True)
