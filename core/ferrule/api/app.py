"""The ASGI application: one path that every call takes, whatever its protocol."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from ferrule import log
from ferrule.api.auth import Keys
from ferrule.api.errors import failure_of
from ferrule.api.gate import Intake, Receive
from ferrule.api.lifecycle import ClientGone, Exchange, Lifecycle
from ferrule.api.middleware import surround
from ferrule.api.respond import Answer, Send
from ferrule.api.routes import Entry, RouteTable, access_of
from ferrule.config import Config
from ferrule.errors import PluginError, RequestError, StartupError, UnauthorisedError, nearest
from ferrule.hooks import HookRunner
from ferrule.interfaces.hooks import AccessRequest
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.router import Access, Call, EventStream, Reply, Route, RouterContext
from ferrule.interfaces.stats import HttpStats

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_MAX_QUERY_FIELDS = 64
_ADMIN_IS_OFF = "Routes for administration are off; FERRULE_SERVER_DEV_MODE=1 switches them on."
_LINGER = (1.0, 8 << 20)  # seconds and bytes for the rest of a body that was refused
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_LOGGED = 512  # characters of a path that the access log repeats

Scope = MutableMapping[str, Any]
CLOSE = "ferrule.close"  # scope["state"] key: a function that makes the connection close after this answer

_logger = log.get("api")
_access = log.get("access")


def build_app(
    config: Config, plugins: Plugins, lifecycle: Lifecycle, hooks: HookRunner | None = None
) -> Callable[..., Any]:
    """The application with the routes of the chosen router plugins. Raises StartupError, PluginError."""
    names = plugins.chosen("router", config.frontend.routers)
    routes: list[Route] = []
    absent: dict[str, str] = {}
    context = RouterContext(config, plugins, lifecycle.service, lambda: tuple(routes), lambda: lifecycle.load)
    for name in names:
        served, advice = _routes_of(plugins, name, context)
        routes += served
        absent |= advice
    if not config.env.server_dev_mode:
        absent |= {route.path: _ADMIN_IS_OFF for route in routes if route.access is Access.ADMIN}
        routes[:] = [route for route in routes if route.access is not Access.ADMIN]
    app = App(config, lifecycle, RouteTable(routes, absent), hooks or HookRunner())
    return surround(app, config.frontend)


def _routes_of(plugins: Plugins, name: str, context: RouterContext) -> tuple[Sequence[Route], Mapping[str, str]]:
    router = plugins.make("router", name)
    try:
        return tuple(router.routes(context)), router.absent(context)
    except StartupError:
        raise
    except Exception as error:
        origin = plugins.origin("router", name)
        raise PluginError(f"Router {name} of {origin} has no routes: {type(error).__name__}: {error}") from error


class App:
    """`__call__` is ASGI. One instance serves a process."""

    def __init__(self, config: Config, lifecycle: Lifecycle, table: RouteTable, hooks: HookRunner) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._table = table
        self._keys = Keys.of(config)
        self._hooks = hooks
        self._front = config.frontend
        self._root = "/" + (config.frontend.root_path or "").strip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        start = time.monotonic()
        close = scope.get("state", {}).get(CLOSE, lambda: None)
        answer = Answer(send, scope["method"], close, self._front.sse_keepalive)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        intake = Intake(receive, headers, self._config.limits)
        request_id = self._request_id(headers, answer)
        template, status = "none", 499
        with self._lifecycle.exchange() as exchange:
            try:
                entry, params = self._admit(scope)
                if entry.decoder is not None:
                    self._lifecycle.work(exchange)
                template = entry.route.path
                call = await self._call(scope, entry, params, (headers, intake, request_id, exchange))
                await self._perform(entry, call, answer, exchange, receive)
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
                    _log(scope, status, time.monotonic() - start)

    def _request_id(self, headers: dict[str, str], answer: Answer) -> str:
        """Ours, always random. With the flag, the client's own is echoed when it is valid."""
        request_id = secrets.token_hex(16)
        if self._front.enable_request_id_headers:
            given = headers.get("x-request-id", "")
            answer.extra.append(("x-request-id", given if _REQUEST_ID.match(given) else request_id))
        return request_id

    def _admit(self, scope: Scope) -> tuple[Entry, dict[str, str]]:
        """Auth comes before anything that tells what exists; only the public list is free."""
        path = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0].decode("latin-1")
        if self._root != "/" and path.startswith(self._root + "/"):
            path = path[len(self._root) :]
        methods, _ = self._table.methods(path)
        known = methods.get("GET" if scope["method"] == "HEAD" else scope["method"])
        access = access_of(methods) if known is None else known.route.access
        if access is not Access.PUBLIC:
            self._authorise(scope, path, access)
        entry, params = self._table.find(scope["method"], path)
        if access is not Access.PUBLIC:
            self._lifecycle.admit(work=entry.decoder is not None)
        return entry, params

    def _authorise(self, scope: Scope, path: str, access: Access) -> None:
        """A hook's word counts; without one, the key decides. Raises UnauthorisedError."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        client = (scope.get("client") or ("",))[0]
        verdict = self._hooks.authorise(AccessRequest(scope["method"], path, headers, client))
        if verdict is False:
            raise UnauthorisedError("This server does not let the call in.")
        if verdict is None:
            self._keys.check([value for name, value in scope["headers"] if name == b"authorization"], access)

    async def _call(
        self,
        scope: Scope,
        entry: Entry,
        params: dict[str, str],
        parts: tuple[dict[str, str], Intake, str, Exchange],
    ) -> Call:
        headers, intake, request_id, exchange = parts
        body: Any = None
        unknown: tuple[str, ...] = ()
        if entry.decoder is not None:
            body, unknown = await exchange.run(intake.decoded(entry.decoder))
            if unknown and self._front.strict_requests:
                raise _strict(unknown, entry.decoder.known)
            # The body may have taken its time.
            self._lifecycle.admit(work=True)
        try:
            pairs = parse_qsl(scope["query_string"].decode("ascii"), True, max_num_fields=_MAX_QUERY_FIELDS)
            query = {name: ",".join(value for other, value in pairs if other == name) for name, _ in pairs}
        except ValueError:
            raise RequestError("The query string is malformed or has too many fields.") from None

        async def disconnected() -> None:
            await exchange.gone.wait()

        return Call(body, params, query, headers, request_id, disconnected, unknown)

    async def _perform(self, entry: Entry, call: Call, answer: Answer, exchange: Exchange, receive: Receive) -> None:
        """Run the handler and send what it returns, while the connection is watched for the client's end."""
        if call.unknown_fields:
            # No error, as clients expect, but not passed over in silence either.
            names = ", ".join(call.unknown_fields)
            answer.extra.append(("x-ferrule-ignored-fields", names))
            _logger.warning("ignored unknown fields", route=entry.route.path, fields=names)
        watch = None if entry.decoder is None else asyncio.create_task(_watch(receive, exchange))
        try:
            reply = await exchange.run(_awaited(entry, call))
            if isinstance(reply, EventStream):
                await answer.stream(reply, exchange)
            else:
                await answer.whole(reply)
        finally:
            if watch is not None:
                watch.cancel()

    async def _refuse(self, error: Exception, answer: Answer, intake: Intake) -> int:
        """Answer with an error. A body that was not read to its end closes the connection, after a short while."""
        failure = failure_of(error)
        if answer.status:
            answer.close()
            _logger.error("an answer failed after its start", status=failure.status)
            await answer.write(b"", more=False)
            return failure.status
        early = not intake.done
        await answer.failure(failure, more=early)
        if early:
            await intake.linger(*_LINGER)
            await answer.write(b"", more=False)
        return failure.status


def _strict(unknown: Sequence[str], known: Iterable[str]) -> RequestError:
    what = "Unknown field" if len(unknown) == 1 else "Unknown fields"
    hint = nearest(unknown[0].rpartition(".")[2], known)
    return RequestError(f"{what}: {', '.join(unknown)}.{hint} The server runs with --strict-requests.", unknown[0])


async def _awaited(entry: Entry, call: Call) -> Reply | EventStream:
    return await entry.route.handler(call)


async def _watch(receive: Receive, exchange: Exchange) -> None:
    """Stop the exchange when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.stop(ClientGone())


def _log(scope: Scope, status: int, seconds: float) -> None:
    """One line per call, escaped: nothing from the wire can make a second line."""
    raw = scope.get("raw_path") or scope["path"].encode()
    path = raw[:_LOGGED].decode("ascii", "backslashreplace").encode("unicode_escape").decode("ascii")
    client = "{}:{}".format(*scope["client"]) if scope.get("client") else "-"
    version = scope.get("http_version", "1.1")
    _access.info('%s - "%s %s HTTP/%s" %d %.0fms', client, scope["method"], path, version, status, seconds * 1000)
