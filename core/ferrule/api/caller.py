"""The second layer: checks who calls, whether they may, and whether the route exists, in this order."""

from __future__ import annotations

from dataclasses import replace

from starlette.types import ASGIApp

from ferrule.api.auth import Keys
from ferrule.api.call import HttpCall, Scope, call_of
from ferrule.api.intake import Receive
from ferrule.api.origin import Hosts, check_origin, host_of
from ferrule.api.paths import PathTable, access_of, decoded, entry_for
from ferrule.api.respond import Send
from ferrule.api_keys import Caller
from ferrule.config import Config
from ferrule.errors import UnauthorisedError
from ferrule.hooks import HEADERS, HookRunner
from ferrule.interfaces.hooks import AccessRequest
from ferrule.interfaces.router import SCOPE_KEY, Access

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class CallerCheck:
    """The layer that authorises a call, finds its route, and passes the call on.

    The key is checked before any answer that tells whether a route exists.
    """

    def __init__(self, app: ASGIApp, config: Config, table: PathTable, keys: Keys, hooks: HookRunner) -> None:
        self._app = app
        self._front = config.frontend
        self._table = table
        self._keys = keys
        self._hooks = hooks
        self._hosts = Hosts((*config.frontend.allowed_hosts, config.frontend.host or ""))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call, answer = call_of(scope), call_of(scope).answer
        known = entry_for(call.methods, scope["method"])
        access = access_of(call.methods) if known is None else known.access
        if access is not Access.PUBLIC:  # only the public list is free
            self._check_browser(scope, call)
            call.caller = self._authorise(scope, call, access)
        entry = self._table.entry(call.methods, scope["method"], call.path)
        call.entry, call.template = entry, entry.path
        answer.route, answer.log_fault = f"{entry.method} {entry.path}", entry.log_fault
        if call.caller is not None:
            call.claim.key = call.caller.name
            answer.info = replace(answer.info, key_name=call.caller.name)
        path = scope["root_path"] + (decoded(call.path) or "")
        HEADERS.set(call.headers)  # each call is a task, with a context of its own
        with self._keys.callers.visit(call.caller if entry.body is not None else None):
            await self._app({**scope, "method": entry.method, "path": path, SCOPE_KEY: answer}, receive, send)

    def _check_browser(self, scope: Scope, call: HttpCall) -> None:
        """Raise ForbiddenError for a request that only a browser sends when another site's page misleads it."""
        headers = call.headers
        if not self._keys.callers:
            self._hosts.check(host_of([value for name, value in scope["headers"] if name == b"host"]))
        if scope["method"] not in _SAFE_METHODS and (origin := headers.get("origin")):
            content_type = headers.get("content-type", "")
            authorised = any(name in headers for name in ("authorization", *call.answer.dialect.key_headers))
            check_origin(origin, headers.get("host", ""), content_type, authorised, self._front.allowed_origins)

    def _authorise(self, scope: Scope, call: HttpCall, access: Access) -> Caller | None:
        """Ask the hooks, and check the key if they do not decide. Raises UnauthorisedError."""
        client = (scope.get("client") or ("",))[0]
        verdict = self._hooks.authorise(AccessRequest(scope["method"], call.path, call.headers, client))
        if verdict is False:
            raise UnauthorisedError("Not authorised.")
        if verdict is True:
            return None
        return self._keys.check(scope["headers"], access, call.answer.dialect)
