"""Connections are accepted, and requests begin, in turns; connections again after descriptors had run out."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ferrule.api import arrivals
from ferrule.api.arrivals import Arrivals, Turns

PATIENCE = 60.0
AT_ONCE = 16


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


def test_a_burst_begins_in_its_order_and_lets_others_run() -> None:
    async def burst() -> list[int]:
        turns, begun, seen = Turns(lambda: AT_ONCE), [], []

        def start(number: int) -> Callable[[], None]:
            return lambda: begun.append(number)

        for number in range(5 * AT_ONCE + 3):
            turns.begin(start(number))
        while len(begun) < 5 * AT_ONCE + 3:
            seen.append(len(begun))
            await asyncio.sleep(0)
        assert begun == list(range(5 * AT_ONCE + 3))
        await asyncio.sleep(0)
        turns.begin(start(-1))  # at rest again: it begins at once
        assert begun[-1] == -1
        return seen

    seen = asyncio.run(burst())
    assert seen[0] == AT_ONCE
    assert all(later - earlier <= AT_ONCE for earlier, later in zip(seen, seen[1:], strict=False))


def test_a_request_that_begins_may_bring_others() -> None:
    async def nested() -> list[str]:
        turns, begun = Turns(lambda: AT_ONCE), []
        for _ in range(AT_ONCE):
            turns.begin(lambda: begun.append("first"))
        turns.begin(lambda: turns.begin(lambda: begun.append("inner")))
        while "inner" not in begun:
            await asyncio.sleep(0)
        return begun

    assert asyncio.run(nested()) == ["first"] * AT_ONCE + ["inner"]


def test_who_waits_for_a_turn_may_leave() -> None:
    async def tasks() -> list[int]:
        turns, came = Turns(lambda: AT_ONCE), list[int]()

        async def come(number: int) -> None:
            await turns.turn()
            came.append(number)

        waiting = [asyncio.create_task(come(number)) for number in range(3 * AT_ONCE)]
        await asyncio.sleep(0)
        assert len(came) == AT_ONCE
        waiting[AT_ONCE].cancel()
        waiting[-1].cancel()
        await asyncio.wait(waiting)
        return came

    came = asyncio.run(tasks())
    assert came == [number for number in range(3 * AT_ONCE - 1) if number != AT_ONCE]
