"""The way back: whole answers, and server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from ferrule.api.errors import Failure, failure_of
from ferrule.api.gate import Message
from ferrule.api.lifecycle import ClientGone, Exchange
from ferrule.interfaces.router import EventStream, Reply

Send = Callable[[Message], Awaitable[None]]

_STREAM_HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)
_DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"

_encoder = msgspec.json.Encoder()


class Answer:
    """One answer: what was sent of it, and the sending. `close` asks the connection to end after it.

    A stream that is silent for `keepalive` seconds gets a comment, so that no proxy takes it for dead; 0: never.
    """

    def __init__(
        self, send: Send, method: str, close: Callable[[], None] = lambda: None, keepalive: float = 0.0
    ) -> None:
        self._send = send
        self._head = method == "HEAD"
        self._keepalive = keepalive
        self.close = close
        self.extra: list[tuple[str, str]] = []  # headers of every answer, such as X-Request-Id
        self.status = 0  # 0: nothing was sent yet
        self.sent = 0  # bytes of bodies
        self.last_write = 0.0

    async def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self.status = status
        pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (*headers, *self.extra)]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, more: bool = True) -> None:
        body = b"" if self._head else data
        self.sent += len(body)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def whole(self, reply: Reply, more: bool = False) -> None:
        """Send a reply. With `more` its last byte goes out, but the exchange stays open."""
        content = reply.content
        if isinstance(content, str):
            content = content.encode()
        elif not isinstance(content, bytes):
            content = _encoder.encode(content)
        headers = [("content-type", reply.media_type), ("content-length", str(len(content))), *reply.headers.items()]
        await self.start(reply.status, headers)
        await self.write(content, more)

    async def failure(self, failure: Failure, more: bool = False) -> None:
        headers: Mapping[str, str] = dict(failure.headers) | ({"connection": "close"} if more else {})
        await self.whole(Reply(failure.body, failure.status, headers=headers), more)

    async def stream(self, reply: EventStream, exchange: Exchange) -> None:
        """Send events until they end, fail, or the client leaves (ClientGone).

        A failure becomes one error event, after which the connection closes without `[DONE]`.
        """
        self.last_write = asyncio.get_running_loop().time()
        ping = asyncio.create_task(self._ping()) if self._keepalive else None
        try:
            await self.start(200, (*_STREAM_HEADERS, *reply.headers.items()))
            await exchange.run(self._pump(reply.events))
            last = _DONE
        except ClientGone:
            raise
        except Exception as error:
            last = _event(failure_of(error).body)
            self.close()
        finally:
            if ping is not None:
                ping.cancel()
            # Here and not in the pump, which never begins when the client leaves just before it.
            await _close(reply.events)
        await self.write(last, more=False)

    async def _pump(self, events: AsyncIterator[Any]) -> None:
        clock = asyncio.get_running_loop().time
        async for event in events:
            await self.write(_event(event))
            self.last_write = clock()

    async def _ping(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self.last_write + self._keepalive - clock())
            if clock() - self.last_write >= self._keepalive:
                await self.write(_PING)
                self.last_write = clock()


async def _close(events: AsyncIterator[Any]) -> None:
    aclose = getattr(events, "aclose", None)
    if aclose is not None:
        await aclose()


def _event(event: Any) -> bytes:
    return b"data: " + _encoder.encode(event) + b"\n\n"
