"""The edge: the ASGI layer around FastAPI, which does what must not depend on a route, and answers all errors.

A call passes it in this order: its query, its caller (`CallerCheck`), its route, whether the server takes work now, its
turn, its body; then FastAPI. The key is checked before any answer that tells whether a route exists.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from ferrule import log
from ferrule.api.arrivals import Turns
from ferrule.api.budget import Budget, Claim
from ferrule.api.caller import CallerCheck
from ferrule.api.intake import DECODED, Intake, Message, Receive
from ferrule.api.lifecycle import ClientGone, Exchange, Lifecycle
from ferrule.api.paths import Entry, Found, PathTable, check_query, raw_path
from ferrule.api.respond import CLOSE, Responder, Send
from ferrule.api_keys import Caller
from ferrule.config import Config
from ferrule.errors import OverloadedError
from ferrule.hooks import HEADERS
from ferrule.interfaces.router import ON_BEHALF, SCOPE_KEY, Access, RequestInfo
from ferrule.interfaces.stats import HttpStats
from ferrule.schema import REQUEST_ID, Undeclared

_AT_ONCE = 4  # requests whose bodies are decoded, and whose work begins, in one turn of the event loop
_LINGER = (2.0, 64 << 20)  # seconds and bytes for the rest of a body that was refused
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_LOGGED = 512  # characters of a path that the access log repeats

Scope = Message
App = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]  # as ASGI's, and a coroutine: it can be a task

_logger = log.get("api")
_access = log.get("access")


@dataclass(slots=True)
class Call:
    """One HTTP call, with what is found out about it."""

    scope: Scope
    found: Found
    exchange: Exchange
    claim: Claim
    intake: Intake
    answer: Responder
    caller: Caller | None = None
    template: str = "none"  # the path of the route, for figures


class Edge:
    """The layer around the application. `ahead` requests wait for their turn, and then for a place in the queue."""

    def __init__(
        self, app: App, config: Config, lifecycle: Lifecycle, table: PathTable, callers: CallerCheck, budget: Budget
    ) -> None:
        self._app = app
        self._config = config
        self._front = config.frontend
        self._lifecycle = lifecycle
        self._table = table
        self._callers = callers
        self._budget = budget
        self._turns = Turns(lambda: _AT_ONCE)  # of requests with bodies
        self._ahead = 0

    def take(self, config: Config) -> None:
        """Apply the limits of this configuration from now on."""
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            with self._lifecycle.exchange() as exchange, self._budget.claim(exchange.stop) as claim:
                await self._answer(self._call(scope, receive, send, exchange, claim))
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _call(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange, claim: Claim) -> Call:
        found = self._table.find(raw_path(scope), scope["method"])
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        undeclared = Undeclared(self._front.strict_requests)
        info = RequestInfo(secrets.token_hex(16), headers, exchange.left, undeclared=undeclared)
        intake = Intake(receive, headers, self._config.limits, self._budget, claim)
        answer = Responder(send, scope["method"], exchange, intake, info, self._front.sse_keepalive)
        answer.close = scope.get("state", {}).get(CLOSE, answer.close)
        answer.dialect = found.dialect
        answer.share = claim.share
        if self._front.enable_request_id_headers or ON_BEHALF in scope:  # the client's own is echoed when it is valid
            given = headers.get("x-request-id", "")
            answer.extra.append(("x-request-id", given if REQUEST_ID.fullmatch(given) else info.id))
        if found.dialect.id_header:
            answer.extra.append((found.dialect.id_header, info.id))
        return Call(scope, found, exchange, claim, intake, answer)

    async def _answer(self, call: Call) -> None:
        """Serve a call, and answer with the error where that fails."""
        start, status, answer = time.monotonic(), 499, call.answer
        try:
            try:
                await self._check(call)
            except ClientGone:
                raise
            except Exception as error:
                await self._refuse(error, call)
            if answer.lingers:
                await call.intake.linger(*_LINGER)
                await answer.end()
            status = answer.status
        except ClientGone:
            pass
        finally:
            self._tell(call, status, time.monotonic() - start)

    async def _check(self, call: Call) -> None:
        """Serve a call if its caller may call, there is such a route, and the server takes work now."""
        scope, found, answer = call.scope, call.found, call.answer
        check_query(scope)
        if found.access is not Access.PUBLIC:  # only the public list is free
            call.caller = self._callers.check(scope, answer.info.headers, found)
        entry = found.entry
        if entry is None:
            raise self._table.refusal(found)
        call.template = entry.path
        answer.route, answer.log_fault = f"{entry.method} {entry.path}", entry.log_fault
        if entry.max_body_bytes is not None:
            call.intake.max_body_bytes = entry.max_body_bytes
        if call.caller is not None:
            call.claim.key = call.caller.name
            answer.info = replace(answer.info, key_name=call.caller.name)
        works = entry.body is not None
        HEADERS.set(answer.info.headers)  # each call is a task, with a context of its own
        with self._callers.keys.visit(call.caller if works else None):
            if entry.access is not Access.PUBLIC:
                self._lifecycle.admit(call.exchange, works)
                if entry.room:
                    self._lifecycle.check_room(self._ahead)
            if works:  # its turn comes, so that a burst leaves the loop to others between its requests
                self._ahead += entry.room
                try:
                    await self._turns.turn()
                finally:
                    self._ahead -= entry.room
            await call.exchange.run(self._serve(call, entry))

    async def _serve(self, call: Call, entry: Entry) -> None:
        """Read the body of a route that has a JSON body, and call FastAPI. The client's departure ends both."""
        answer, root = call.answer, self._table.root
        scope = {**call.scope, "root_path": root, "method": entry.method, "path": root + call.found.plain}
        scope[SCOPE_KEY] = answer
        if entry.body is not None:
            types = answer.dialect.body_types
            scope[DECODED] = answer.info.undeclared.value = await call.intake.json(types)
            if types:  # FastAPI takes a body without a type as JSON
                scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
            self._lifecycle.admit(call.exchange, True)  # the body may have taken its time
        watch = asyncio.create_task(call.intake.watch(call.exchange))
        try:
            await self._app(scope, call.intake.receive, answer.send)
        finally:
            watch.cancel()

    async def _refuse(self, error: Exception, call: Call) -> None:
        """Answer with an error, unless FastAPI has answered: it raises an unexpected exception again after its
        answer.
        """
        answer = call.answer
        if answer.ended:
            return
        failure = answer.describe(error)
        if answer.status:
            answer.close()
            _logger.error("an answer failed after its start", status=failure.status)
            await answer.end()
            return
        if isinstance(error, OverloadedError):
            await call.intake.skip()
        await answer.failure(failure)

    def _tell(self, call: Call, status: int, seconds: float) -> None:
        """Count a call, and log one line, escaped, so that nothing from the wire can make a second line."""
        scope = call.scope
        told = HttpStats(
            route=call.template,
            method=scope["method"] if scope["method"] in _METHODS else "OTHER",
            status=status,
            seconds=seconds,
            received=call.intake.received,
            sent=call.answer.sent,
        )
        self._lifecycle.live.answered(told)
        if self._front.disable_uvicorn_access_log:
            return
        client = "{}:{}".format(*scope["client"]) if scope.get("client") else "-"
        path = raw_path(scope)[:_LOGGED].decode("ascii", "backslashreplace").encode("unicode_escape").decode("ascii")
        request = (client, scope["method"], path, scope.get("http_version", "1.1"), status, seconds * 1000)
        named = {"key": call.caller.name} if call.caller else {}
        _access.info('%s - "%s %s HTTP/%s" %d %.0fms', *request, **named)
