"""Accepts connections on the listening socket, which all API processes share, and spreads bursts over turns.

Each turn of the event loop accepts a limited number of connections, and begins a limited number of requests (`Turns`),
so that running requests go on in between. The limit is high where no other process accepts: reading request heads is
cheap, and a health probe that arrives behind a thousand connections must not wait until all of them were served.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from ferrule import log

AT_ONCE = 64  # connections that are accepted in one turn of the event loop
SHARED = 8  # the same where other processes accept, too: they have their turn meanwhile
_RETRY = 0.1  # seconds after a failure to accept: descriptors may have run out

MakeProtocol = Callable[[], asyncio.Protocol]

_logger = log.get("api")


class Arrivals:
    """The object that uvicorn takes for its asyncio server: `close` ends what `open` began.

    `tls` has keyword arguments of `connect_accepted_socket`.
    """

    def __init__(self, listener: socket.socket, at_once: int, tls: dict[str, Any]) -> None:
        self._listener = listener
        self._at_once = at_once
        self._tls = tls
        self._retry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, make_protocol: MakeProtocol) -> None:
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more connections."""
        self._loop.remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()
        self._listener.close()

    async def wait_closed(self) -> None:
        """Return at once: uvicorn waits for the connections."""

    def _resume(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(self._at_once):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                _logger.warning("a connection cannot be accepted: %s", error.strerror)
                self._loop.remove_reader(self._listener.fileno())
                self._retry = self._loop.call_later(_RETRY, self._resume)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._take(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection, **self._tls)
        except OSError:  # the client has left, or speaks no TLS
            connection.close()


class Turns:
    """A gate that lets at most `at_once()` callers through in a turn of the event loop; others follow in order."""

    def __init__(self, at_once: Callable[[], int]) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._at_once = at_once
        self._left = at_once()
        self._counting = False  # `_next` is due

    def begin(self, start: Callable[[], None]) -> None:
        """Call `start` now, or in a later turn."""
        if self._left and not self._waiting:
            self._left -= 1
            start()
        else:
            self._waiting.append(start)
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next)

    async def turn(self) -> None:
        """Return now, or in a later turn."""
        has_come: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def come() -> None:
            if not has_come.done():  # the task was cancelled
                has_come.set_result(None)

        self.begin(come)
        if not has_come.done():
            await has_come

    def _next(self) -> None:
        at_once = self._left = self._at_once()
        while self._left and self._waiting:
            self._left -= 1
            self._waiting.popleft()()
        self._counting = self._left < at_once
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next)
