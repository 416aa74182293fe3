"""While the queue is full a request is refused before its body is decoded, and a small one keeps its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ferrule.api.arrivals import Turns
from ferrule.api.lifecycle import Lifecycle
from ferrule.errors import OverloadedError
from ferrule_testkit.service import ScriptedService
from tests.unit.api.test_server import Running, running

ROUTERS = ("openai", "health", "tokenize")
SMALL = b'{"prompt": '  # not JSON


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ScriptedService, ahead: int) -> None:
        raise OverloadedError("The queue is full.", 3)

    monkeypatch.setattr(ScriptedService, "check_room", refuse)


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode() + body


def asked(monkeypatch: pytest.MonkeyPatch, ask: Callable[[Running], object]) -> object:
    async def run() -> object:
        async with running(routers=ROUTERS) as server:
            full(monkeypatch)
            found = ask(server)
            return await found if asyncio.iscoroutine(found) else found

    return asyncio.run(run())


def test_small_bodies_keep_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    text = asked(
        monkeypatch,
        lambda server: server.raw(post("/v1/completions", SMALL) + post("/v1/chat/completions", SMALL) + last),
    )
    assert isinstance(text, bytes)
    assert text.count(b"HTTP/1.1 429 ") == 2
    assert text.count(b"retry-after: 3\r\n") == 2
    assert text.count(b"HTTP/1.1 200 OK") == 1


def test_a_large_body_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    text = asked(monkeypatch, lambda server: server.raw(post("/v1/completions", SMALL, 20 << 20)))
    assert isinstance(text, bytes)
    assert text.startswith(b"HTTP/1.1 429 ")
    assert b"connection: close\r\n" in text


def test_other_routes_need_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"prompt": "hello"}'
    text = asked(
        monkeypatch,
        lambda server: server.raw(post("/tokenize", body).replace(b"host: x", b"host: x\r\nconnection: close")),
    )
    assert isinstance(text, bytes)
    assert text.startswith(b"HTTP/1.1 200 ")


def test_requests_that_wait_for_their_turn_are_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell the last of a burst that there is no room, without waiting for the work of the others. Requests that need no
    room are not counted, and neither is one that has left.
    """
    room: list[int] = []
    waiting = 0

    async def run() -> None:
        gate = asyncio.Event()

        async def turn(turns: Turns) -> None:
            nonlocal waiting
            waiting += 1
            await gate.wait()

        monkeypatch.setattr(Turns, "turn", turn)
        monkeypatch.setattr(ScriptedService, "check_room", lambda service, ahead: room.append(ahead))
        async with running(routers=ROUTERS) as server:
            calls = []
            for path in ("/v1/completions", "/tokenize", "/v1/completions", "/v1/completions"):
                calls.append(asyncio.create_task(server.http.post(path, json={"prompt": "hello"})))
                while waiting < len(calls):
                    await asyncio.sleep(0.01)
            gate.set()
            assert [call.status_code for call in await asyncio.gather(*calls)] == [200] * 4
            await server.http.post("/v1/completions", json={"prompt": "hello"})

    asyncio.run(run())
    assert room == [0, 1, 2, 0]


def test_a_turn_takes_less_while_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse clients that ask again at once without taking the processor from work."""
    clock = [100.0]
    monkeypatch.setattr("ferrule.api.lifecycle.time.monotonic", lambda: clock[0])
    lifecycle = Lifecycle()
    lifecycle.ready(ScriptedService())
    lifecycle.check_room(0)
    at_rest = lifecycle.at_once()
    full(monkeypatch)
    with pytest.raises(OverloadedError):
        lifecycle.check_room(0)
    assert 0 < lifecycle.at_once() < at_rest
    clock[0] += 5
    assert lifecycle.at_once() == at_rest
