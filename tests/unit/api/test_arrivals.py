"""Connections are accepted in turns, and again after descriptors had run out."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ferrule.api import arrivals
from ferrule.api.arrivals import Arrivals

PATIENCE = 60.0


class Taken(asyncio.Protocol):
    """A protocol that notes the turn of the event loop in which a connection was accepted."""

    made: list[asyncio.BaseTransport]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.append(transport)


class Scarce(socket.socket):
    """A listening socket; `accept` fails with the errors that are left."""

    errors: list[int]

    def accept(self) -> tuple[socket.socket, Any]:
        if self.errors:
            raise OSError(self.errors.pop(), "none")
        return super().accept()


@asynccontextmanager
async def listening(at_once: int, errors: Sequence[int] = ()) -> AsyncIterator[tuple[Arrivals, Scarce, type[Taken]]]:
    listener = Scarce()
    listener.errors = list(errors)
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    made = type("Made", (Taken,), {"made": []})
    server = Arrivals(listener, at_once, {})
    try:
        yield server, listener, made
    finally:
        if listener.fileno() >= 0:
            server.close()
        for transport in made.made:
            transport.abort()  # type: ignore[attr-defined]


async def until(count: int, made: list[asyncio.BaseTransport]) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(made) < count:
            await asyncio.sleep(0.01)


async def test_a_burst_is_accepted_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(4) as (server, listener, made):
        clients = [socket.create_connection(listener.getsockname()) for _ in range(10)]
        turns: list[int] = []
        real = Arrivals._accept

        def accept(self: Arrivals) -> None:
            before = len(self._tasks)
            real(self)
            turns.append(len(self._tasks) - before)

        monkeypatch.setattr(Arrivals, "_accept", accept)
        server.open(made)
        await until(10, made.made)
        assert max(turns) == 4
        assert sum(turns) == 10
        for client in clients:
            client.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
async def test_descriptors_that_run_out_end_nothing(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_RETRY", 0.01)
    async with listening(4, [number, number]) as (server, listener, made):
        with socket.create_connection(listener.getsockname()):
            server.open(made)
            await until(1, made.made)
            assert not listener.errors


async def test_who_left_before_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(4, [errno.ECONNABORTED]) as (server, listener, made):
        with socket.create_connection(listener.getsockname()):
            server.open(made)
            await until(1, made.made)


async def test_nothing_is_accepted_after_the_end() -> None:
    async with listening(4, [errno.EMFILE]) as (server, listener, made):
        address = listener.getsockname()
        with socket.create_connection(address):
            server.open(made)
            async with asyncio.timeout(PATIENCE):
                while listener.errors:
                    await asyncio.sleep(0.01)
            server.close()
            await asyncio.sleep(0.3)
            assert not made.made
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
