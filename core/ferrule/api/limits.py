"""The outermost layer: registers one exchange for each call, bounds its path and its query, and answers all errors."""

from __future__ import annotations

import secrets
import time

from starlette.types import ASGIApp

from ferrule import log
from ferrule.api.access_log import log_call
from ferrule.api.budget import Budget, Claim
from ferrule.api.call import CALL, HttpCall, Scope
from ferrule.api.intake import Intake, Receive
from ferrule.api.lifecycle import ClientGone, Exchange, Lifecycle
from ferrule.api.paths import PathTable, check_query, raw_path
from ferrule.api.respond import Responder, Send
from ferrule.config import Config
from ferrule.errors import OverloadedError
from ferrule.interfaces.router import ON_BEHALF, RequestInfo
from ferrule.interfaces.stats import HttpStats
from ferrule.schema import REQUEST_ID, Undeclared

_LINGER = (2.0, 64 << 20)  # seconds and bytes for the rest of a body that was refused
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
CLOSE = "ferrule.close"  # scope["state"] key: a function that makes the connection close after this answer

_logger = log.get("api")


class Limits:
    """The layer that passes a call on with its `HttpCall`, and answers what is raised in the dialect of the path."""

    def __init__(self, app: ASGIApp, config: Config, lifecycle: Lifecycle, table: PathTable, budget: Budget) -> None:
        self._app = app
        self._config = config
        self._lifecycle = lifecycle
        self._table = table
        self._budget = budget
        self._front = config.frontend

    def take(self, config: Config) -> None:
        """Apply the limits of this configuration from now on."""
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            with self._lifecycle.exchange() as exchange, self._budget.claim(exchange.stop) as claim:
                await self._serve(scope, self._call(scope, receive, send, exchange, claim))
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, call: HttpCall) -> None:
        start, status, answer = time.monotonic(), 499, call.answer
        try:
            try:
                check_query(scope)
                await self._app({**scope, CALL: call, "root_path": self._table.root}, call.intake.receive, answer.send)
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
            self._tell(scope, call, status, time.monotonic() - start)

    def _call(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange, claim: Claim) -> HttpCall:
        path = self._table.path_of(raw_path(scope))
        methods = self._table.methods(path)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        intake = Intake(receive, headers, self._config.limits, self._budget, claim)
        answer = Responder(send, scope["method"], exchange, intake, self._front.sse_keepalive)
        answer.close = scope.get("state", {}).get(CLOSE, answer.close)
        answer.dialect = self._table.dialect(methods, scope["method"], path)
        answer.share = claim.share
        undeclared = Undeclared(self._front.strict_requests)
        answer.info = RequestInfo(secrets.token_hex(16), headers, exchange.left, undeclared=undeclared)
        if self._front.enable_request_id_headers or ON_BEHALF in scope:  # the client's own is echoed when it is valid
            given = headers.get("x-request-id", "")
            answer.extra.append(("x-request-id", given if REQUEST_ID.fullmatch(given) else answer.info.id))
        if answer.dialect.id_header:
            answer.extra.append((answer.dialect.id_header, answer.info.id))
        return HttpCall(path, headers, methods, exchange, claim, intake, answer)

    async def _refuse(self, error: Exception, call: HttpCall) -> None:
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

    def _tell(self, scope: Scope, call: HttpCall, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        received, sent = call.intake.received, call.answer.sent
        told = HttpStats(
            route=call.template, method=method, status=status, seconds=seconds, received=received, sent=sent
        )
        self._lifecycle.live.answered(told)
        if not self._front.disable_uvicorn_access_log:
            client = "{}:{}".format(*scope["client"]) if scope.get("client") else "-"
            request = (scope["method"], raw_path(scope), scope.get("http_version", "1.1"))
            log_call(client, request, status, seconds, call.caller.name if call.caller else "")
