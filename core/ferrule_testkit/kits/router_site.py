"""A router under test in the real frame, over a scripted service, called without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter

from ferrule.api.app import build_app
from ferrule.api.lifecycle import Lifecycle
from ferrule.api.paths import Entry
from ferrule.api.routes import entries_of
from ferrule.config import Config, FrontendConfig, LimitsConfig, LoRAConfig
from ferrule.env import Environment
from ferrule.interfaces.dialect import OPENAI, Dialect
from ferrule.interfaces.router import RouterContext
from ferrule.interfaces.service import Admitted, Generate
from ferrule.plugin import Plugins
from ferrule_testkit.installed import installed_plugins
from ferrule_testkit.service import ScriptedService

_NAME = "under-test"
_PATIENCE = 20.0  # seconds for one call


@dataclass
class SentResponse:
    """A response to one call. `problems` are breaches of ASGI: a response that starts or ends twice, or never."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    problems: list[str] = field(default_factory=list)
    dialect: Dialect = OPENAI  # of errors


class Asked(ScriptedService):
    """A service that counts how often it was asked to generate."""

    asked = 0

    async def admit(self, request: Generate) -> Admitted:
        self.asked += 1
        return await super().admit(request)


class Site:
    """One application with the router under test, in admin mode so that all of its routes are there."""

    dialect: Dialect

    def __init__(
        self,
        router: Any,
        ready: bool,
        frontend: Mapping[str, Any],
        limits: LimitsConfig,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.service = Asked()
        self._lifecycle = Lifecycle()
        self._ready = ready
        self.routes: Sequence[Entry] = ()
        config = Config(
            frontend=FrontendConfig(**{"routers": (_NAME,), "disable_uvicorn_access_log": True, **frontend}),
            limits=limits,
            env=Environment(server_dev_mode=True, allow_runtime_lora_updating=True),
            lora=LoRAConfig(enable_lora=True),
        )
        self._app = build_app(config, _Plugins(router, self, options), self._lifecycle)

    def call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        leave: str = "",
    ) -> SentResponse:
        """Call a route. With `leave` the client disconnects after the "start" of the answer, or after the first piece
        of its "body".
        """
        return asyncio.run(self._call(method, path, body, headers or {}, leave))

    async def _call(self, method: str, path: str, body: bytes, headers: Mapping[str, str], leave: str) -> SentResponse:
        if self._ready:
            self._lifecycle.ready(self.service)
        answer, gone = SentResponse(dialect=self.dialect), asyncio.Event()
        sent = [False, False]  # the request's body, and the answer's end

        async def receive() -> dict[str, Any]:
            if not sent[0]:
                sent[0] = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            if leave and message["type"] == f"http.response.{leave}":
                gone.set()
            if message["type"] == "http.response.start":
                if answer.status:
                    answer.problems.append("the answer starts twice")
                answer.status = message["status"]
                answer.headers = {key.decode(): value.decode("latin-1") for key, value in message["headers"]}
            elif message["type"] == "http.response.body":
                if not answer.status or sent[1]:
                    answer.problems.append("a body comes before the start, or after the end")
                answer.body += message.get("body", b"")
                sent[1] = not message.get("more_body", False)

        given = {"content-type": "application/json", "content-length": str(len(body)), "host": "kit", **headers}
        raw = path.encode("latin-1", "replace")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": raw,
            "query_string": b"",
            "root_path": "",
            "headers": [(key.lower().encode(), value.encode()) for key, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._app(scope, receive, send)
        except TimeoutError:
            answer.problems.append(f"no answer within {_PATIENCE:.0f} s")
        if not leave and (not answer.status or not sent[1]):
            answer.problems.append("the answer has no end")
        return answer


class _Plugins(Plugins):
    """The installed plugins, and the router under test, which tells the site its routes."""

    def __init__(self, router: Any, site: Site, options: Mapping[str, Any]) -> None:
        super().__init__(options={f"router:{_NAME}": dict(options)} if options else {})
        self._installed = installed_plugins()
        self._router, self._site = router, site

    def names(self, kind: str) -> tuple[str, ...]:
        return self._installed.names(kind)

    def load(self, kind: str, name: str) -> Any:
        if (kind, name) != ("router", _NAME):
            return self._installed.load(kind, name)
        router, site = self._router, self._site

        class Told(router):  # type: ignore[misc, valid-type]
            def dialect(self, ctx: RouterContext) -> Dialect:
                site.dialect = super().dialect(ctx)
                return site.dialect

            def router(self, ctx: RouterContext) -> APIRouter:
                made = super().router(ctx)
                site.routes = tuple(entries_of(made, dialect=site.dialect))
                return made  # type: ignore[no-any-return]

        return Told

    def origin(self, kind: str, name: str) -> str:
        return self._installed.origin(kind, name)
