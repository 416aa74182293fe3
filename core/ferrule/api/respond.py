"""Sends answers: headers of every answer, errors, and streams of events, in the dialect of a protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ferrule import log
from ferrule.api.errors import failure_of, log_unexpected
from ferrule.api.intake import Intake, Message
from ferrule.api.lifecycle import ClientGone, Exchange
from ferrule.interfaces.dialect import OPENAI, Dialect, Failure, encode
from ferrule.interfaces.router import JSON, SCOPE_KEY, EventStream, RequestInfo
from ferrule.shared_memory.buffers import Share

_logger = log.get("api")

Send = Callable[[Message], Awaitable[None]]

_PIECE = 1 << 16  # bytes of a body that are handed to the connection at once
CLOSE = "ferrule.close"  # scope["state"] key: a function that makes the connection close after this answer


class Responder:
    """One answer: sends it and records what was sent. It is the `Frame` of `ferrule.interfaces.router`.

    `close` asks the connection to end after the answer. A stream that is silent for `keepalive` seconds gets the
    dialect's ping; 0: never. An error that comes before the body was read to its end closes the connection, and the
    answer's last byte waits for `end`: until then the answer `lingers`, or the client would not get to read it.
    """

    dialect: Dialect = OPENAI
    share: Share | None = None  # where what is being sent is counted
    route = "a request"  # what it answers, for the log, and what logs that its router failed
    log_fault: Callable[[str], None] = staticmethod(log_unexpected)
    close: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        send: Send,
        method: str,
        exchange: Exchange,
        intake: Intake,
        info: RequestInfo,
        keepalive: float = 0.0,
    ) -> None:
        self.info = info
        self._send = send
        self._head = method == "HEAD"
        self._exchange = exchange
        self._intake = intake
        self._keepalive = keepalive
        self._failure: Failure | None = None  # what the client is told, once something has failed
        self.extra: list[tuple[str, str]] = []  # headers of every answer, such as X-Request-Id
        self.status = 0  # 0: nothing was sent yet
        self.lingers = False
        self.ended = False  # the application has sent all of it
        self.sent = 0  # bytes of bodies
        self.last_write = 0.0

    async def send(self, message: Message) -> None:
        """Serve as ASGI's `send` for the application."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.lingers = self.status >= 400 and not self._intake.done
            headers = [*self.extra, *([("connection", "close")] if self.lingers else ())]
            if unknown := self.info.undeclared.places:
                names = ", ".join(unknown)
                _logger.warning("ignored unknown fields", route=self.route, fields=names)
                headers.append(("x-ferrule-ignored-fields", names))
            if headers:
                message = {**message, "headers": [*message["headers"], *_encoded(headers)]}
        elif message["type"] == "http.response.body":
            body = b"" if self._head else message.get("body", b"")
            self.sent += len(body)
            self.ended = not message.get("more_body", False)
            if len(body) > _PIECE:
                body = await self._send_pieces(body)
            self._exchange.answered = self.ended
            message = {**message, "body": body, "more_body": not self.ended or self.lingers}
        await self._send(message)

    async def end(self) -> None:
        """Send the end of an answer that was held back, or of one that failed after its start."""
        self.lingers = False
        await self.write(b"", more=False)

    async def _send_pieces(self, body: bytes) -> bytes:
        """Send a large body as the client reads it, and return its last piece. `share` counts the body until then."""
        if self.share is not None:
            self.share.grow(len(body))
        last = (len(body) - 1) // _PIECE * _PIECE
        try:
            for start in range(0, last, _PIECE):
                piece = body[start : start + _PIECE]
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            if self.share is not None:
                self.share.grow(-len(body))
        return body[last:]

    async def write(self, data: bytes, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    def describe(self, error: BaseException) -> Failure:
        """Return what the client is told for the exception that is being handled. The first exception counts."""
        if self._failure is None:
            own_id = self.info.id if self.dialect.id_header else ""
            self._failure = replace(failure_of(error, self.log_fault, self.route), request_id=own_id)
        return self._failure

    async def failure(self, failure: Failure) -> None:
        """Send an error."""
        body = encode(self.dialect.error(failure))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), *failure.headers]
        await self.send({"type": "http.response.start", "status": failure.status, "headers": _encoded(headers)})
        await self.write(body, more=False)

    async def stream(self, reply: EventStream) -> None:
        """Send events until they end, fail, or the client leaves (ClientGone).

        A failure becomes one error event, after which the connection closes without the dialect's last line.
        """
        dialect, headers = self.dialect, reply.raw_headers
        if "content-type" not in reply.headers:
            headers = [*headers, (b"content-type", dialect.media_type.encode("latin-1"))]
        self.last_write = asyncio.get_running_loop().time()
        ping = asyncio.create_task(self._ping()) if self._keepalive and dialect.ping else None
        try:
            await self.send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
            await self._exchange.run(self._pump(reply.events))
            last = dialect.last
        except ClientGone:
            raise
        except Exception as error:
            last = dialect.event(dialect.error(self.describe(error)))
            self.close()
        finally:
            if ping is not None:
                ping.cancel()
            # Here and not in the pump, which never begins when the client leaves just before it.
            if hasattr(reply.events, "aclose"):
                await reply.events.aclose()
        await self.write(last, more=False)

    async def _pump(self, events: AsyncIterator[Any]) -> None:
        clock, encoded = asyncio.get_running_loop().time, self.dialect.event
        async for event in events:
            await self.write(encoded(event))
            self.last_write = clock()

    async def _ping(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self.last_write + self._keepalive - clock())
            if clock() - self.last_write >= self._keepalive:
                await self.write(self.dialect.ping)
                self.last_write = clock()


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer an exception of a route: the handler that FastAPI calls for all exceptions."""
    if isinstance(cause := error.__cause__, ClientGone):  # while FastAPI read the body
        raise cause
    if isinstance(error, ClientGone):
        raise error
    answer: Responder = request.scope[SCOPE_KEY]
    failure = answer.describe(error)
    return JSON(answer.dialect.error(failure), failure.status, dict(failure.headers))


def _encoded(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
