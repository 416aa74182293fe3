"""While the queue is full a request is refused before its body is decoded, and a small one keeps its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ferrule.errors import OverloadedError
from ferrule_testkit.service import ScriptedService
from tests.unit.api.test_server import Running, running

SMALL = b'{"prompt": '  # not JSON


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ScriptedService) -> None:
        raise OverloadedError("The queue is full.", 3)

    monkeypatch.setattr(ScriptedService, "check_room", refuse)


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode() + body


def asked(monkeypatch: pytest.MonkeyPatch, ask: Callable[[Running], object]) -> object:
    async def run() -> object:
        async with running() as server:
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
