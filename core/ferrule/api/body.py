"""The third layer: refuses calls that the server cannot take now, and reads and decodes JSON bodies once."""

from __future__ import annotations

import asyncio

from ferrule.api.call import App, HttpCall, Scope, call_of
from ferrule.api.decoded import DECODED
from ferrule.api.intake import Message, Receive
from ferrule.api.lifecycle import Exchange, Lifecycle
from ferrule.api.paths import Entry
from ferrule.api.respond import Send
from ferrule.api.turns import Turns
from ferrule.interfaces.router import Access

_AT_ONCE = 4  # requests whose bodies are decoded, and whose work begins, in one turn of the event loop


class BodyReader:
    """The layer that refuses what the server cannot take now, reads a JSON body, and calls the application.

    The connection is watched for the client's departure while the application runs.
    """

    def __init__(self, app: App, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._turns = Turns(lambda: _AT_ONCE)  # of requests with bodies
        self._ahead = 0  # requests that wait for their turn, and then for a place in the queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = call_of(scope)
        entry = call.entry
        if entry.access is not Access.PUBLIC:
            self._lifecycle.admit(work=entry.body is not None)
            if entry.room:
                self._lifecycle.check_room(self._ahead)
        if entry.body is not None:
            self._lifecycle.work(call.exchange)
            await self._turn(entry)
        await call.exchange.run(self._serve(scope, receive, send, call))

    async def _serve(self, scope: Scope, receive: Receive, send: Send, call: HttpCall) -> None:
        if call.entry.body is not None:
            types = call.answer.dialect.body_types
            body, scope[DECODED] = await call.intake.json(types)
            if types:  # FastAPI takes a body without a type as JSON
                scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
            self._lifecycle.admit(work=True)  # the body may have taken its time
            call.answer.info.undeclared.value = scope[DECODED]
            receive = _replay(body, call.exchange)
        watch = asyncio.create_task(call.intake.watch(call.exchange))
        try:
            await self._app(scope, receive, send)
        finally:
            watch.cancel()

    async def _turn(self, entry: Entry) -> None:
        """Wait for the request's turn, so that a burst leaves the loop to others between its requests."""
        self._ahead += entry.room
        try:
            await self._turns.turn()
        finally:
            self._ahead -= entry.room


def _replay(body: bytes, exchange: Exchange) -> Receive:
    """Return an ASGI `receive` that delivers a body already read, and then waits for the client to leave."""
    pieces = [body]

    async def receive() -> Message:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(), "more_body": False}
        await exchange.left()
        return {"type": "http.disconnect"}

    return receive
