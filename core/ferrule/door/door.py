"""The door: a thread of the launcher that accepts connections, answers probes, and hands all else to API processes.

The first bytes of a connection are looked at and stay in the socket. Nothing is read but the head of a probe that is
answered here, so a connection can be handed over at any time, also between a probe and another request. Why it is here,
and not in a thread of an API process: docs/architecture.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ferrule import log
from ferrule.api import access_log
from ferrule.config import Resolved
from ferrule.door.desk import Desk, resolve
from ferrule.door.probes import Call
from ferrule.errors import NotFoundError, UnavailableError
from ferrule.interfaces.plugins import Plugins
from ferrule.wire.board import Board
from ferrule.wire.doorway import AT_ONCE, Doorway

_AT_ONCE = 64  # most connections that are accepted before others get a turn
_LOOKED_AT = 8 << 10  # bytes
_SILENT = 1.0  # seconds after which a client that says nothing is an API process's to wait for
_IDLE = 256  # most connections that are kept for another probe
_RETRY = 0.1  # seconds after a failure to accept: descriptors may have run out

_logger = log.get("launch")


class Door:
    """Made on the launcher's main thread. `open` starts the thread, which owns all but `drain` and `close`."""

    def __init__(
        self,
        config: Resolved,
        plugins: Plugins,
        board: Board,
        folder: Path,
        listeners: Sequence[socket.socket],
        probe: socket.socket | None = None,
    ) -> None:
        self._config = config
        self._listeners = [*listeners, *([probe] if probe is not None else [])]
        self._probe = probe  # `--probe-port`
        pairs = [Doorway.pair() for _ in range(config.frontend.api_server_count)]
        self.far_ends = [theirs for _, theirs in pairs]  # the children's
        self._doorways = deque(ours for ours, _ in pairs)  # of the processes that live; the next one's turn is first
        self._desk = Desk(config, plugins, board, folder, tuple(self._doorways))
        self._silent = _Silent(self._meet, self._hand)
        self._arrived: deque[socket.socket] = deque()  # those to hand over; they wait where no API process has room
        self._flushing = False  # `_flush` is due
        self._idle = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)

    # ---- the launcher's side

    def open(self) -> None:
        """Begin to accept: the far ends have been inherited."""
        for end in self.far_ends:
            end.close()
        access_log.set_level(self._config)
        if self._probe is not None:
            _logger.info("probes are answered on port %d, without TLS", self._probe.getsockname()[1])
        self._thread.start()

    def drain(self) -> None:
        """From now on the server is shutting down, whether or not an API process has come to say so."""
        self._desk.draining = True

    def close(self) -> None:
        """End the thread. What was not handed over is closed."""
        if self._thread.ident is None:  # the processes could not be started
            return
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        """However it ends, the API processes notice, and end too."""
        try:
            for doorway in self._doorways:
                self._loop.add_reader(doorway.fileno(), self._hear, doorway)
            for listener in self._listeners:
                listener.setblocking(False)
                _accept_when_they_speak(listener)
                self._loop.add_reader(listener.fileno(), self._accept, listener)
            await self._ended.wait()
        finally:
            for listener in self._listeners:
                self._loop.remove_reader(listener.fileno())
                listener.close()
            while self._doorways:
                self._lose(self._doorways[0])
            self._silent.close()
            for connection in self._arrived:
                connection.close()

    def _hear(self, doorway: Doorway) -> None:
        try:
            _, message = doorway.receive()
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._lose(doorway)
            return
        if message is not None:
            self._desk.hear(doorway, message)

    def _lose(self, doorway: Doorway) -> None:
        """An API process has ended, or must, because nothing reaches it. With the last one the server has ended."""
        self._loop.remove_reader(doorway.fileno())
        self._loop.remove_writer(doorway.fileno())
        self._doorways.remove(doorway)
        doorway.close()
        if not self._doorways:
            self._ended.set()

    def _accept(self, listener: socket.socket) -> None:
        connections, error = _accepted(listener)
        if error is not None:
            _logger.warning("a connection cannot be accepted: %s", error.strerror)
            self._loop.remove_reader(listener.fileno())
            self._loop.call_later(_RETRY, self._resume, listener)
        for connection in connections:
            if listener is self._probe:
                self._start(self._attend(connection))
            else:
                self._meet(connection)

    def _meet(self, connection: socket.socket) -> None:
        """What becomes of a connection is decided by its first bytes, which are awaited for a moment.

        Under a burst this is what a probe waits for: no task is made for what is only handed over.
        """
        try:
            call = self._look(connection)
        except BlockingIOError:
            self._silent.add(connection)
        except OSError:  # the client has left
            connection.close()
        else:
            if call is None:
                self._hand(connection)
            else:
                self._start(self._answer(connection, call))

    def _resume(self, listener: socket.socket) -> None:
        if not self._ended.is_set():
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- probes

    def _look(self, connection: socket.socket, alone: bool = False) -> Call | None:
        """The probe that has arrived; None for anything else, which is not answered here unless `alone`.

        Raises BlockingIOError when nothing has arrived, and another OSError when nothing will.
        """
        head = connection.recv(_LOOKED_AT, socket.MSG_PEEK)
        if not head:
            raise ConnectionResetError
        return self._desk.read_alone(head) if alone else self._desk.read(head)

    async def _attend(self, connection: socket.socket) -> None:
        """A connection to the probes' own port, where nobody else answers."""
        await self._readable(connection, self._config.limits.header_timeout)
        try:
            call = self._look(connection, alone=True)
        except OSError:
            connection.close()
        else:
            await self._answer(connection, call, alone=True)

    async def _readable(self, connection: socket.socket, seconds: float) -> None:
        """Return when there is something to read, or after so many seconds."""
        arrived: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(connection.fileno(), resolve, arrived)
        try:
            await asyncio.wait([arrived], timeout=seconds)
        finally:
            self._loop.remove_reader(connection.fileno())

    async def _answer(self, connection: socket.socket, call: Call | None, alone: bool = False) -> None:
        """Answer a probe, and the probes that follow it on the connection; hand it over for anything else."""
        mine = True
        try:
            client = _client_of(connection)
            while call is not None:
                await self._send(connection, call, client)
                if not call.keep_alive:
                    return
                self._idle += 1
                try:
                    await self._readable(connection, self._config.limits.keep_alive_timeout)
                finally:
                    self._idle -= 1
                call = self._look(connection, alone)
            if alone:
                await self._loop.sock_sendall(connection, _NOT_HERE)
            else:
                mine = False
                self._hand(connection)
        except (OSError, TimeoutError):  # the client has left, or does not read, or says nothing more
            return
        finally:
            if mine:
                connection.close()

    async def _send(self, connection: socket.socket, call: Call, client: str) -> None:
        began = time.monotonic()
        connection.recv(call.length)
        call.keep_alive = call.keep_alive and self._idle < _IDLE
        status, answer = await self._desk.answer(call)
        async with asyncio.timeout(self._config.limits.write_timeout):
            await self._loop.sock_sendall(connection, answer)
        self._desk.note(call, client, status, len(answer.partition(b"\r\n\r\n")[2]), began)

    # ---- everything else

    def _hand(self, connection: socket.socket) -> None:
        """Give a connection to an API process, with the others of this turn of the loop."""
        self._arrived.append(connection)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Those for which no API process has room wait, up to a limit."""
        self._flushing = False
        while self._arrived:
            batch = [self._arrived[place] for place in range(min(AT_ONCE, len(self._arrived)))]
            if not self._given(batch):
                break
            for connection in batch:
                self._arrived.popleft()
                connection.close()
        for doorway in self._doorways:
            if self._arrived:
                self._loop.add_writer(doorway.fileno(), self._flush)
            else:
                self._loop.remove_writer(doorway.fileno())
        while len(self._arrived) > self._config.limits.max_connections:
            connection = self._arrived.pop()
            with contextlib.suppress(OSError):
                connection.send(_FULL)
            connection.close()

    def _given(self, batch: Sequence[socket.socket]) -> bool:
        """Whether an API process took them."""
        for doorway in tuple(self._doorways):
            try:
                given = doorway.hand(batch)
            except OSError:
                self._lose(doorway)
                continue
            if given:
                self._doorways.rotate(-1)
                return True
        return False


class _Silent:
    """Connections that have said nothing: `meet` gets one when it speaks, `give_up` after `_SILENT` seconds."""

    def __init__(self, meet: Callable[[socket.socket], None], give_up: Callable[[socket.socket], None]) -> None:
        self._meet, self._give_up = meet, give_up
        self._until: dict[socket.socket, float] = {}  # the loop's time, the soonest first
        self._looks = False  # `_look` is due

    def add(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if not self._looks:
            self._looks = True
            loop.call_later(_SILENT, self._look)
        self._until[connection] = loop.time() + _SILENT
        loop.add_reader(connection.fileno(), self._speaks, connection)

    def _speaks(self, connection: socket.socket) -> None:
        self._remove(connection)
        self._meet(connection)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while self._until:
            connection, until = next(iter(self._until.items()))
            if until > loop.time():
                loop.call_at(until, self._look)
                return
            self._remove(connection)
            self._give_up(connection)
        self._looks = False

    def _remove(self, connection: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(connection.fileno())
        del self._until[connection]

    def close(self) -> None:
        for connection in tuple(self._until):
            self._remove(connection)
            connection.close()


def accepts(config: Resolved) -> bool:
    """Whether a door accepts for the API processes. With TLS nothing can be told before the handshake, which is theirs;
    sockets that keep the borders of messages and tell of the other's end are Linux's.
    """
    return config.frontend.ssl_certfile is None and sys.platform == "linux"


def has_door(config: Resolved) -> bool:
    """Whether there is one, if only for `--probe-port`."""
    return accepts(config) or config.frontend.probe_port is not None


def _accept_when_they_speak(listener: socket.socket) -> None:
    """Let the kernel keep a connection until its first bytes have come, or for about `_SILENT`.

    The door then wakes once for a connection in place of twice, and has less than half of the work. Where the system
    cannot do it, the door waits itself.
    """
    if sys.platform == "linux" and listener.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, math.ceil(_SILENT))


def _accepted(listener: socket.socket) -> tuple[list[socket.socket], OSError | None]:
    """What has come, as much as is accepted in one turn, and what keeps more from being accepted."""
    found: list[socket.socket] = []
    for _ in range(_AT_ONCE):
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            break
        except OSError as error:
            return found, error
        connection.setblocking(False)
        found.append(connection)
    return found, None


def _client_of(connection: socket.socket) -> str:
    """host:port for the log; "-" for a Unix socket, and for a client that has left."""
    with contextlib.suppress(OSError):
        name = connection.getpeername()
        return "{}:{}".format(*name[:2]) if isinstance(name, tuple) else "-"
    return "-"


def _refusal(status: int, kind: str, message: str, *headers: str) -> bytes:
    """An error that ends a connection."""
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "content-type: application/json", *headers]
    lines += ["connection: close", f"content-length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


_FULL = _refusal(503, UnavailableError.kind, "The server has too many open connections.", "retry-after: 1")
_NOT_HERE = _refusal(
    404, NotFoundError.kind, "This port answers GET /health and /ping, and /metrics with the key that it may need."
)
