"""The application over a scripted service, without a socket: for tests of routes."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import httpx
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from ferrule.api.app import build_app
from ferrule.api.lifecycle import Lifecycle
from ferrule.config import Config, FrontendConfig, ModelConfig, SchedulerConfig
from ferrule.interfaces.service import Generate
from ferrule.plugin import discover
from ferrule_testkit.service import ScriptedService


class Site:
    """An application over a scripted service. `policy` is the scheduling policy; `scheduler`, `model` and `frontend`
    are options of these sections.

    Sites of one process with the same options share an application: building one takes a fifth of a second. A call goes
    to the service of its site; calls to two such sites are not to be made at the same time.
    """

    _applications: ClassVar[dict[bytes, tuple[ASGIApp, Lifecycle]]] = {}

    def __init__(
        self,
        policy: str = "fcfs",
        model: dict[str, Any] | None = None,
        scheduler: dict[str, Any] | None = None,
        **frontend: Any,
    ) -> None:
        self.service = ScriptedService()
        self.config = Config(
            model=ModelConfig(**(model or {})),
            frontend=FrontendConfig(**frontend),
            scheduler=SchedulerConfig(scheduling_policy=policy, **(scheduler or {})),
        )
        key = msgspec.json.encode(self.config)
        if key not in self._applications:
            lifecycle = Lifecycle()
            self._applications[key] = build_app(self.config, discover(), lifecycle), lifecycle
        self._application, self._lifecycle = self._applications[key]
        self._lifecycle.ready(self.service)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://test")

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve ASGI."""
        self._lifecycle.live.attach(self.service)
        await self._application(scope, receive, send)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "hello"} | body)

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return await self.http.post("/v1/chat/completions", json={"messages": messages} | body)

    @property
    def last(self) -> Generate:
        """The request that the service was given last."""
        return self.service.requests[-1]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Return the error object of an answer that must be one."""
    if response.status_code != status:
        raise AssertionError(f"{response.status_code}, not {status}: {response.text}")
    found = response.json()["error"]
    if set(found) != {"message", "type", "param", "code"}:
        raise AssertionError(response.text)
    return dict(found)


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream that must have gone well."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    if response.status_code != 200 or events.pop() != "[DONE]":
        raise AssertionError(response.text)
    return [json.loads(event) for event in events]
