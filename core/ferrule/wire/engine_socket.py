"""Both ends of the engine's socket: msgpack frames over ZeroMQ on a private Unix socket, a closed set of types.

A write that the system refused (it had no buffers, say) is what ZeroMQ tries again only at its next heartbeat, so both
ends send heartbeats. They come from threads of ZeroMQ, whatever the process does, and nobody is given up for a missing
one: a process that was stopped for a while loses nothing, and the launcher knows which ones have died.

The engine binds before it loads anything, so that clients may connect and greet at any time; a client greets by
calling ``hello`` and is answered with `Ready` once the model is loaded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from ferrule import log
from ferrule.errors import StartupError
from ferrule.types import EngineStats, RequestDelta
from ferrule.wire.messages import Call, Deltas, Fatal, FromEngine, Ready, ToEngine, Unread

HELLO = "hello"

_HEARTBEAT_MS = 500
_UNREADABLE = Fatal("A message of the engine cannot be read.")
_NEVER_MS = 2**31 - 1  # the longest time that ZeroMQ takes

_logger = log.get("engine")


def _open(context: zmq.Context[zmq.Socket[bytes]], kind: int, linger_ms: int) -> zmq.Socket[bytes]:
    """Open a socket without a limit on waiting messages: a slow peer must never block a loop or lose a token."""
    socket = context.socket(kind)
    options = {zmq.LINGER: linger_ms, zmq.SNDHWM: 0, zmq.RCVHWM: 0}
    for option, value in {**options, zmq.HEARTBEAT_IVL: _HEARTBEAT_MS, zmq.HEARTBEAT_TIMEOUT: _NEVER_MS}.items():
        socket.setsockopt(option, value)
    return socket


class _Head(msgspec.Struct, frozen=True):
    """The id of a delta's request, without the rest of the delta."""

    id: str


class _Parts(msgspec.Struct, frozen=True, tag="Deltas"):
    """A `Deltas` message whose parts are not decoded yet."""

    deltas: tuple[msgspec.Raw, ...]
    stats: EngineStats | None = None


class EngineSocket:
    """The engine's end. The thread that runs the loop owns it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._context = zmq.Context()
        self._socket = _open(self._context, zmq.ROUTER, linger_ms=500)
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
        """Return the messages that have arrived; wait up to `timeout` seconds for the first. Foreign frames are
        dropped.
        """
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
            except ValueError:  # msgspec's own errors, and a text that is not UTF-8
                _logger.warning("dropped a frame that is not a message, bytes=%d", len(frames[-1]))
                continue
            client = frames[0]
            if not isinstance(message, Call) or message.name != HELLO:
                messages.append((client, message))
            elif self.ready is not None:
                self.send(client, self.ready)

    def send(self, client: bytes, message: FromEngine) -> None:
        """Queue a message; the socket drops one for a client that has gone."""
        self._socket.send_multipart([client, self._encoder.encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._path.unlink(missing_ok=True)


class ClientSocket:
    """A client's end. The thread of the client's event loop owns it, and waits for `fd` to become readable.

    `identity` names the client to the engine, and is unique among its clients.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        self._context = zmq.Context()
        self._socket = _open(self._context, zmq.DEALER, linger_ms=0)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(f"ipc://{path}")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._parts = msgspec.msgpack.Decoder(_Parts)
        self._delta, self._head = msgspec.msgpack.Decoder(RequestDelta), msgspec.msgpack.Decoder(_Head)
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def greet(self) -> None:
        """Ask for `Ready`, which is sent once the model is loaded; a greeting before that is not answered."""
        self.send(Call(0, HELLO))

    def send(self, message: ToEngine) -> bool:
        """Send without waiting. Returns True when messages have arrived, for which `fd` may not become readable any
        more.

        ZeroMQ's descriptor is edge-triggered: sending may consume the edge of a message that has just arrived.
        """
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self) -> Iterator[FromEngine | Unread]:
        """Yield the messages that have arrived; a message too large for the memory becomes `Unread` for its
        requests.
        """
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False).buffer  # a copy may be too large
            except zmq.Again:
                return
            try:
                yield self._decoder.decode(frame)
            except ValueError:  # its request is not known
                yield _UNREADABLE
            except MemoryError:
                yield from self._in_parts(frame)

    def _in_parts(self, frame: memoryview) -> tuple[FromEngine | Unread, ...]:
        """Return the message in `frame`, decoded one request at a time: a part too large for the memory costs only its
        request.
        """
        try:
            parts = self._parts.decode(frame)
        except ValueError:  # it concerns no request
            return (_UNREADABLE,)
        deltas, unread = [], []
        for part in parts.deltas:
            try:
                deltas.append(self._delta.decode(part))
            except MemoryError:
                unread.append(self._head.decode(part).id)
        return Deltas(tuple(deltas), parts.stats), Unread(tuple(unread))

    def close(self) -> None:
        self._socket.close()
        self._context.term()
