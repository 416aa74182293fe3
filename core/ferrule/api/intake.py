"""A request's body on its way in: limits of size and time, content type, strict JSON."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from ferrule.api.json_body import JsonScan, decode, scan_whole
from ferrule.api.lifecycle import ClientGone, Exchange
from ferrule.config import LimitsConfig
from ferrule.errors import RequestError, TooLargeError, TooSlowError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

_SKIP_SECONDS = 1.0
_PIECE = 1 << 16  # bytes scanned without giving other requests a turn


class Intake:
    """Reads one request's body under the limits. `done` tells whether all of it was read."""

    def __init__(self, receive: Receive, headers: Mapping[str, str], limits: LimitsConfig) -> None:
        self._receive = receive
        self._headers = headers
        self._limits = limits
        self.received = 0  # bytes
        self.done = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

    async def json(self) -> tuple[bytes, Any]:
        """The whole body, and the value that it holds. Raises RequestError, ClientGone."""
        self._check_headers()
        body, scan = await self._read()
        return body, decode(body, scan)

    async def receive(self) -> Message:
        """ASGI's `receive` under the limits, for handlers that read the body themselves."""
        piece = await self._next()
        self._count(self.received)
        return {"type": "http.request", "body": piece, "more_body": not self.done}

    def _check_headers(self) -> None:
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > self._limits.max_body_bytes:
            raise self._too_large()
        encoding = self._headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise RequestError("Content-Encoding is not supported: send the body uncompressed.", "Content-Encoding")
        media_type, _, rest = self._headers.get("content-type", "application/json").lower().partition(";")
        kind = media_type.strip()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise RequestError("Content-Type must be application/json.", "Content-Type")
        if "charset" in rest and "utf-8" not in rest and "utf8" not in rest:
            raise RequestError("The body must be UTF-8.", "Content-Type")

    async def _read(self) -> tuple[bytes, JsonScan]:
        """All of the body, scanned as it arrives."""
        first = await self._next()
        if self.done:
            self._count(len(first))
            if len(first) <= _PIECE:
                return first, scan_whole(first, self._limits.max_json_depth)
        pieces, total, piece = [first], 0, first
        scan = JsonScan(self._limits.max_json_depth)
        while True:
            total += len(piece)
            self._count(total)
            for start in range(0, len(piece), _PIECE):
                scan.feed(piece[start : start + _PIECE])
                await asyncio.sleep(0)
            if self.done:
                return b"".join(pieces), scan
            piece = await self._next()
            pieces.append(piece)

    def _count(self, total: int) -> None:
        if total > self._limits.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"The body is larger than the limit of {self._limits.max_body_bytes} bytes.")

    async def _next(self) -> bytes:
        message: Message | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.body_timeout):
                message = await self._receive()
        if message is None:  # raised here, without a context: the frames of a TimeoutError know the task that failed
            raise TooSlowError(f"No byte of the body came for {self._limits.body_timeout:g} s.")
        if message["type"] != "http.request":
            raise ClientGone()
        self.done = not message.get("more_body", False)
        body = bytes(message.get("body", b""))
        self.received += len(body)
        return body

    async def watch(self, exchange: Exchange) -> None:
        """Stop the exchange when the client leaves. A body that was not read is the handler's to read."""
        if self.done:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            exchange.stop(ClientGone())

    async def skip(self) -> None:
        """Drop a small body that is about to be here, so that the connection can go on after an early answer."""
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) <= _PIECE:
            await self.linger(_SKIP_SECONDS, _PIECE)

    async def linger(self, seconds: float, num_bytes: int) -> None:
        """Read and drop what is still on its way, so that the client gets to read an early answer."""
        try:
            async with asyncio.timeout(seconds):
                while not self.done and num_bytes > 0:
                    num_bytes -= len(await self._next())
        except (TimeoutError, TooSlowError, ClientGone):
            return
