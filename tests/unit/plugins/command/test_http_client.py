"""The client of all commands: events of streamed responses, and what `bench serve` makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ferrule_plugins.command import http_client
from ferrule_plugins.command.bench.load import Record, send
from ferrule_plugins.command.http_client import events, open_session

SSE = "text/event-stream"


@asynccontextmanager
async def saying(body: bytes, content_type: str = SSE, status: str = "200 OK", length: int = 0) -> AsyncIterator[str]:
    """Run a server that answers the same to everybody, and yield its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {length or len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def read(body: bytes, content_type: str = SSE) -> list[bytes]:
    async with saying(body, content_type) as url, open_session() as session, session.get(url) as response:
        return [data async for data in events(response)]


async def test_events() -> None:
    assert await read(b"data: a\n\ndata:b\r\n\r\n: waiting\n\nevent: x\ndata: c\ndata:  d\n\n") == [
        b"a",
        b"b",
        b"c\n d",
    ]
    assert await read(b"data: a\n\ndata: the last") == [b"a", b"the last"]
    assert await read(b"") == []
    assert await read(b'{"a":\n1}', "application/json; charset=utf-8") == [b'{"a":\n1}']


async def test_a_line_is_as_long_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    long = b"x" * (1 << 20)
    assert await read(b"data: " + long + b"\n\n") == [long]
    monkeypatch.setattr(http_client, "_LINE_BYTES", 1 << 18)
    with pytest.raises(ValueError, match="without an end"):
        await read(b"data: " + long + b"\n\n")


TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


async def sent(body: bytes, status: str = "200 OK", length: int = 0) -> Record:
    async with saying(body, status=status, length=length) as url, open_session() as session:
        return await send(session, url, {})


async def test_what_the_benchmark_records() -> None:
    record = await sent(TOKEN + TOKEN + USAGE + DONE)
    assert (record.error, len(record.chunks)) == (None, 2)
    assert (record.prompt_tokens, record.output_tokens) == (3, 2)
    assert record.start < record.chunks[0] <= record.chunks[1] <= record.end


@pytest.mark.parametrize(
    ("body", "status", "length", "error"),
    [
        (TOKEN, "200 OK", 0, "without [DONE]"),
        (TOKEN + b'data: {"error": {"message": "it broke"}}\n\n', "200 OK", 0, "it broke"),
        (TOKEN, "200 OK", 10_000, "ClientPayloadError"),
        (b"data: no JSON\n\n", "200 OK", 0, "JSONDecodeError"),
        (b"full", "429 Too Many Requests", 0, "HTTP 429: full"),
    ],
)
async def test_requests_that_fail_say_why(body: bytes, status: str, length: int, error: str) -> None:
    assert error in ((await sent(body, status, length)).error or "")
