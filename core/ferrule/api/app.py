"""The frame: one ASGI application around FastAPI's, the path that every call takes, whatever its protocol.

Path and key, admission, the body under its limits, strict JSON, undeclared fields: in this order, and all of it before
FastAPI is called. See `ferrule.interfaces.router` for what a route may rely on.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

from fastapi import FastAPI
from starlette.types import ASGIApp

from ferrule import log
from ferrule.api.access_log import log_call
from ferrule.api.auth import Keys
from ferrule.api.budget import Budget
from ferrule.api.endpoints import GIVEN, Given, reads_body
from ferrule.api.intake import Intake, Message, Receive
from ferrule.api.lifecycle import ClientGone, Exchange, Lifecycle
from ferrule.api.middleware import surround
from ferrule.api.origin import Hosts, check_origin, host_of
from ferrule.api.paths import Entry, PathTable, access_of, raw_path
from ferrule.api.reload import Reloads
from ferrule.api.respond import Answer, Send
from ferrule.api.routes import assemble
from ferrule.api.turns import Turns
from ferrule.api_keys import Caller
from ferrule.config import Config, RouterSettings
from ferrule.errors import OverloadedError, RequestError, UnauthorisedError, nearest
from ferrule.hooks import HookRunner
from ferrule.interfaces.dialect import Dialect
from ferrule.interfaces.hooks import AccessRequest
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.router import SCOPE_KEY, Access, RequestInfo, RouterContext
from ferrule.interfaces.stats import HttpStats
from ferrule.schema import REQUEST_ID
from ferrule.wire.buffers import Buffers

_AT_ONCE = 4  # requests whose bodies are decoded, and whose work begins, in one turn of the event loop
_MAX_QUERY_FIELDS = 64
_LINGER = (2.0, 64 << 20)  # seconds and bytes for the rest of a body that was refused
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

Scope = Message
CLOSE = "ferrule.close"  # scope["state"] key: a function that makes the connection close after this answer

_logger = log.get("api")


def build_app(
    config: Config,
    plugins: Plugins,
    lifecycle: Lifecycle,
    hooks: HookRunner | None = None,
    reloads: Reloads | None = None,
) -> ASGIApp:
    """The application with the routes of the chosen router plugins. Raises StartupError, PluginError."""
    context = RouterContext(RouterSettings.of(config, plugins), plugins, lifecycle.service, lambda: lifecycle.load)
    inner, table = assemble(config, plugins, context)
    hooks = hooks or HookRunner()
    frame = Frame(config, lifecycle, inner, table, hooks)
    if reloads is not None:
        reloads.add("keys", frame.take_keys)
        reloads.add("limits of bodies", frame.take_limits)
    lifecycle.dialect = frame.dialect
    return surround(frame, config.frontend, frame.dialect)


class Frame:
    """`__call__` is ASGI. One instance serves a process."""

    def __init__(
        self, config: Config, lifecycle: Lifecycle, inner: FastAPI, table: PathTable, hooks: HookRunner
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._inner = inner
        self._table = table
        self.keys = Keys(config, lifecycle.board)
        self._hosts = Hosts((*config.frontend.allowed_hosts, config.frontend.host or ""))
        self._hooks = hooks
        self.buffers = Buffers(lifecycle.board, config.limits.max_buffered_bytes)
        self._budget = Budget(self.buffers, lambda: len(self.keys.callers) > 1)
        self._turns = Turns(lambda: _AT_ONCE)  # of requests with bodies
        self._ahead = 0  # requests that wait for their turn, and then for a place in the queue
        self._front = config.frontend
        self._root = "/" + config.frontend.root_path.strip("/")

    def take_keys(self, config: Config) -> None:
        """Other keys from now on. Raises ConfigError: they stay as they were."""
        self.keys.take(config)

    def take_limits(self, config: Config) -> None:
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        start = time.monotonic()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        close = scope.get("state", {}).get(CLOSE, lambda: None)
        template, status, caller = "none", 499, None
        with self._lifecycle.exchange() as exchange, self._budget.claim(exchange.stop) as claim:
            intake = Intake(receive, headers, self._config.limits, self._budget, claim)
            answer = Answer(send, scope["method"], exchange, close, self._front.sse_keepalive)
            answer.share = claim.share
            request_id = self._request_id(headers, answer)
            try:
                path = self._path(raw_path(scope))
                answer.dialect = self._table.dialect(scope["method"], path)
                entry, params, caller = self._admit(scope, path, headers, answer.dialect)
                claim.key = caller.name if caller else ""
                if entry.body is not None:
                    self._lifecycle.work(exchange)
                template = entry.path
                answer.route, answer.log_fault = f"{entry.method} {entry.path}", entry.log_fault
                answer.info = RequestInfo(request_id, headers, exchange.left, key_name=caller.name if caller else "")
                with self.keys.callers.visit(caller if entry.body is not None else None):
                    await self._serve({**scope, "path_params": params}, entry, intake, answer, exchange)
                status = answer.status
            except ClientGone:
                status = 499
            except Exception as error:
                status = await self._refuse(error, answer, intake)
            finally:
                self._lifecycle.live.answered(
                    HttpStats(
                        route=template,
                        method=scope["method"] if scope["method"] in _METHODS else "OTHER",
                        status=status,
                        seconds=time.monotonic() - start,
                        received=intake.received,
                        sent=answer.sent,
                    )
                )
                if not self._front.disable_uvicorn_access_log:
                    _log(scope, status, time.monotonic() - start, caller)

    def _request_id(self, headers: dict[str, str], answer: Answer) -> str:
        """Ours, always random. With the flag, the client's own is echoed when it is valid."""
        request_id = secrets.token_hex(16)
        if self._front.enable_request_id_headers:
            given = headers.get("x-request-id", "")
            answer.extra.append(("x-request-id", given if REQUEST_ID.fullmatch(given) else request_id))
        return request_id

    def dialect(self, raw: bytes) -> Dialect:
        """Return the dialect of a path that comes to nothing before it is routed."""
        return self._table.dialect("", self._path(raw))

    def _path(self, raw: bytes) -> str:
        """Return the path as it came, without the server's root."""
        path = raw.partition(b"?")[0].decode("latin-1")
        under_root = self._root != "/" and path.startswith(self._root + "/")
        return path[len(self._root) :] if under_root else path

    def _admit(
        self, scope: Scope, path: str, headers: dict[str, str], dialect: Dialect
    ) -> tuple[Entry, dict[str, str], Caller | None]:
        """Auth comes before anything that tells what exists; only the public list is free."""
        methods, _ = self._table.methods(path)
        known = methods.get("GET" if scope["method"] == "HEAD" else scope["method"])
        access = access_of(methods) if known is None else known.access
        if access is Access.PUBLIC:
            return *self._table.find(scope["method"], path), None
        self._check_browser(scope, headers, dialect)
        caller = self._authorise(scope, path, headers, access, dialect)
        entry, params = self._table.find(scope["method"], path)
        self._lifecycle.admit(work=entry.body is not None)
        if entry.room:
            self._lifecycle.check_room(self._ahead)
        return entry, params, caller

    def _check_browser(self, scope: Scope, headers: dict[str, str], dialect: Dialect) -> None:
        """Raise ForbiddenError for what only a browser sends, misled by somebody else's page."""
        if not self.keys.callers:
            self._hosts.check(host_of([value for name, value in scope["headers"] if name == b"host"]))
        if scope["method"] not in _SAFE_METHODS and (origin := headers.get("origin")):
            content_type = headers.get("content-type", "")
            authorised = any(name in headers for name in ("authorization", *dialect.key_headers))
            check_origin(origin, headers.get("host", ""), content_type, authorised, self._front.allowed_origins)

    def _authorise(
        self, scope: Scope, path: str, headers: dict[str, str], access: Access, dialect: Dialect
    ) -> Caller | None:
        """A hook's word counts; without one, the key decides. Raises UnauthorisedError."""
        client = (scope.get("client") or ("",))[0]
        verdict = self._hooks.authorise(AccessRequest(scope["method"], path, headers, client))
        if verdict is False:
            raise UnauthorisedError("Not authorised.")
        if verdict is True:
            return None
        return self.keys.check(scope["headers"], access, dialect)

    async def _serve(self, scope: Scope, entry: Entry, intake: Intake, answer: Answer, exchange: Exchange) -> None:
        """Call the application, while the connection is watched for the client's end."""
        try:
            parse_qsl(scope["query_string"].decode("ascii"), True, max_num_fields=_MAX_QUERY_FIELDS)
        except ValueError:
            raise RequestError("The query string is malformed or has too many fields.") from None
        receive: Receive = intake.receive
        if entry.body is not None:
            await self._turn(entry)
            given = Given(*await exchange.run(intake.json(reads_body(entry.endpoint))))
            self._check_fields(entry, given.value, answer)
            self._lifecycle.admit(work=True)  # the body may have taken its time
            receive = _given(given.body, exchange)
            scope[GIVEN] = given
            if "content-type" not in answer.info.headers:
                scope["headers"] = [*scope["headers"], (b"content-type", b"application/json")]
        chosen = {"route": entry.route, "endpoint": entry.route.endpoint, "method": entry.method}
        scope.update(chosen | {"app": self._inner, "router": self._inner.router, SCOPE_KEY: answer})
        watch = None if entry.access is Access.PUBLIC else asyncio.create_task(intake.watch(exchange))
        try:
            await exchange.run(entry.endpoint(scope, receive, answer.send))
        finally:
            if watch is not None:
                watch.cancel()

    async def _turn(self, entry: Entry) -> None:
        """Wait for the request's turn, so that a burst leaves the loop to others between its requests."""
        self._ahead += entry.room
        try:
            await self._turns.turn()
        finally:
            self._ahead -= entry.room

    def _check_fields(self, entry: Entry, value: Any, answer: Answer) -> None:
        """Undeclared fields: no error, as clients expect, but not passed over in silence either."""
        shape = entry.body
        unknown = () if shape is None else shape.unknown(value)
        if not unknown or shape is None:
            return
        if self._front.strict_requests:
            raise _strict(unknown, shape.names)
        names = ", ".join(unknown)
        answer.info = replace(answer.info, unknown_fields=unknown)
        answer.extra.append(("x-ferrule-ignored-fields", names))
        _logger.warning("ignored unknown fields", route=entry.path, fields=names)

    async def _refuse(self, error: Exception, answer: Answer, intake: Intake) -> int:
        """Answer with an error. A body that was not read to its end closes the connection, after a short while."""
        failure = answer.describe(error)
        if answer.status:
            answer.close()
            _logger.error("an answer failed after its start", status=failure.status)
            await answer.write(b"", more=False)
            return failure.status
        if isinstance(error, OverloadedError):
            await intake.skip()
        early = not intake.done
        await answer.failure(failure, more=early)
        if early:
            await intake.linger(*_LINGER)
            await answer.write(b"", more=False)
        return failure.status


def _given(body: bytes, exchange: Exchange) -> Receive:
    """ASGI's `receive` for a body that was read: all of it, then the client's end."""
    pieces = [body]

    async def receive() -> Message:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(), "more_body": False}
        await exchange.left()
        return {"type": "http.disconnect"}

    return receive


def _strict(unknown: Sequence[str], known: Iterable[str]) -> RequestError:
    what = "Unknown field" if len(unknown) == 1 else "Unknown fields"
    hint = nearest(unknown[0].rpartition(".")[2], known)
    return RequestError(f"{what}: {', '.join(unknown)}.{hint} The server runs with --strict-requests.", unknown[0])


def _log(scope: Scope, status: int, seconds: float, caller: Caller | None) -> None:
    client = "{}:{}".format(*scope["client"]) if scope.get("client") else "-"
    request = (scope["method"], raw_path(scope), scope.get("http_version", "1.1"))
    log_call(client, request, status, seconds, caller.name if caller else "")
