"""Reads a request's body, under limits of size and time, as strict JSON, and hands the value to FastAPI, which would
decode it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, MutableMapping
from typing import Any

from fastapi.routing import APIRoute, APIRouter, iter_route_contexts
from starlette.requests import Request
from starlette.responses import Response

from ferrule.api.budget import LARGE, Budget, Claim
from ferrule.api.json_body import JsonScan, decode, decode_large
from ferrule.api.lifecycle import ClientGone, Exchange
from ferrule.config import LimitsConfig
from ferrule.errors import RequestError, TooLargeError, TooSlowError
from ferrule.interfaces.router import SCOPE_KEY, Frame
from ferrule.schema.undeclared import telling

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]

DECODED = "ferrule.decoded"  # key of the ASGI scope: the value of the request's JSON body

_SKIP_SECONDS = 1.0
_PIECE = 1 << 16  # bytes scanned without giving other requests a turn


class Intake:
    """The body of one request, read under the limits. `done` tells whether all of it was read.

    `claim` is the exchange's part of the `budget`: the body's bytes while it arrives, then about the size of its value.
    """

    def __init__(
        self, receive: Receive, headers: Mapping[str, str], limits: LimitsConfig, budget: Budget, claim: Claim
    ) -> None:
        self._budget = budget
        self._claim = claim
        self._receive = receive
        self._headers = headers
        self._limits = limits
        self.max_body_bytes = limits.max_body_bytes
        self.received = 0  # bytes
        self.done = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        self._handed_over = asyncio.Event()  # the handler that reads the body has all of it
        self._told = False  # that handler was told that this is all
        self._whole = b""  # a body that was read here, and not yet by the handler

    async def json(self, types: Collection[str] = ()) -> Any:
        """Read the whole body, and return the value that it holds. `receive` then gives the body to the handler.
        `types` are media types beside JSON's.

        Raises RequestError, ClientGone, UnavailableError.
        """
        self._check_headers(types)
        first = await self._next()
        if self.done and len(first) <= _PIECE:
            await self._budget.grow(self._claim, 2 * len(first))
            self._whole = first
            return decode(first, self._limits.max_json_depth, self._limits.max_json_values)
        self._claim.reading = True
        try:
            body, scan = await self._read(first)
        finally:
            self._claim.reading = False
        more = len(body) + scan.num_bytes - self._claim.share.size
        if more > 0:
            await self._budget.grow(self._claim, more)
        value = await decode_large(body, scan)
        self._budget.resize(self._claim, len(body) + scan.num_bytes)
        self._whole = bytes(body)
        return value

    async def receive(self) -> Message:
        """Serve as ASGI's `receive`.

        Messages bring the body under the limits, and then the client's departure, which may take its time.
        """
        if self._told:
            return await self._disconnect()
        piece, self._whole = self._whole, b""
        if not self.done:
            piece = await self._next()
            self._count(self.received)
        if self.done:
            self._told = True
            self._handed_over.set()
        return {"type": "http.request", "body": piece, "more_body": not self.done}

    async def _disconnect(self) -> Message:
        while (message := await self._receive())["type"] != "http.disconnect":
            pass
        return message

    def _check_headers(self, types: Collection[str]) -> None:
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > self.max_body_bytes:
            raise self._too_large()
        encoding = self._headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise RequestError("Content-Encoding is not supported: send the body uncompressed.", "Content-Encoding")
        media_type, _, rest = self._headers.get("content-type", "application/json").lower().partition(";")
        kind = media_type.strip()
        is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
        if not is_json and kind not in types:
            raise RequestError("Content-Type must be application/json.", "Content-Type")
        if "charset" in rest and "utf-8" not in rest and "utf8" not in rest:
            raise RequestError("The body must be UTF-8.", "Content-Type")

    async def _read(self, piece: bytes) -> tuple[bytearray, JsonScan]:
        """Read the rest of a body whose first piece is given, and return all of it, scanned as it arrived."""
        body = bytearray()
        scan = JsonScan(self._limits.max_json_depth, self._limits.max_json_values)
        while True:
            self._count(len(body) + len(piece))
            await self._reserve(len(body) + len(piece))
            body += piece
            for start in range(0, len(piece), _PIECE):
                scan.feed(piece[start : start + _PIECE])
                await asyncio.sleep(0)
            if self.done:
                return body, scan
            piece = await self._next()

    async def _reserve(self, total: int) -> None:
        """Reserve room for the bytes received; from a megabyte on, for the whole body and as much for its value."""
        has = self._claim.share.size
        if total <= has:
            return
        if total < LARGE:
            await self._budget.grow(self._claim, total - has)
            return
        length = self._headers.get("content-length", "")
        whole = max(total, int(length) if length.isdigit() else self.max_body_bytes)
        await self._budget.grow(self._claim, min(2 * whole, self._budget.most) - has, turn=True)

    def _count(self, total: int) -> None:
        if total > self.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"The body is larger than the limit of {self.max_body_bytes} bytes.")

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
        self._claim.received = self.received
        return body

    async def watch(self, exchange: Exchange) -> None:
        """Stop the exchange when the client leaves after the whole body has arrived.

        Until then the handler reads the body, and notices by itself that the client has left.
        """
        if not self.done:
            await self._handed_over.wait()
        await self._disconnect()
        exchange.stop(ClientGone())

    async def skip(self) -> None:
        """Drop a small body that is about to arrive, so that the connection can go on after an early answer."""
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) <= _PIECE:
            await self.linger(_SKIP_SECONDS, _PIECE)

    async def linger(self, seconds: float, num_bytes: int) -> None:
        """Read and drop the rest of the body, so that the client gets to read an early answer."""
        try:
            async with asyncio.timeout(seconds):
                while not self.done and num_bytes > 0:
                    num_bytes -= len(await self._next())
        except (TimeoutError, TooSlowError, ClientGone):
            return


class _Decoded(Request):
    """A request whose body is not decoded a second time."""

    async def json(self) -> Any:
        return self.scope[DECODED] if DECODED in self.scope else await super().json()


class _Handing:
    """A replacement for `APIRoute.get_route_handler` whose handlers receive requests with decoded bodies."""

    def __init__(self, make: Callable[[], Handler]) -> None:
        self._make = make

    def __call__(self) -> Handler:
        handler = self._make()

        async def handle(request: Request) -> Response:
            frame: Frame = request.scope[SCOPE_KEY]
            with telling(frame.info.undeclared):
                return await handler(_Decoded(request.scope, request.receive))

        return handle


def hand_decoded(router: APIRouter) -> None:
    """Have all routes of a router find their bodies already decoded.

    A router that several applications include is changed once.
    """
    for context in iter_route_contexts(router.routes):
        route = context.original_route
        if isinstance(route, APIRoute) and not isinstance(route.get_route_handler, _Handing):
            route.get_route_handler = _Handing(route.get_route_handler)  # type: ignore[method-assign]
