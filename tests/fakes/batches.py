"""A server with the router `batches` in this process, its lifespan included; no engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from ferrule.api.app import build_app
from ferrule.api.lifecycle import Lifecycle
from ferrule.config import Config, FrontendConfig, LimitsConfig
from ferrule.config.plugins import configured
from ferrule.config.sections import PluginConfig
from ferrule.env import Environment
from ferrule.plugin import discover
from ferrule_testkit.service import ScriptedService

URL = "/v1/completions"
PLUGINS = discover()


def line(custom_id: Any, url: str = URL, **body: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "hi", "max_tokens": 1, **body}}
    return json.dumps(fields).encode() + b"\n"


class BatchSite:
    """A server and a client for it. `running` runs the worker of batches."""

    def __init__(
        self,
        folder: Path,
        limits: dict[str, Any] | None = None,
        keys: tuple[str, ...] = ("k1", "k2"),
        **options: Any,
    ) -> None:
        chosen = PluginConfig(plugin_config={"router:batches": {"folder": str(folder), **options}})
        plugins = configured(PLUGINS, chosen, Environment())
        front = FrontendConfig(
            api_key=keys, routers=("openai", "anthropic", "batches"), disable_uvicorn_access_log=True
        )
        self.lifecycle = Lifecycle()
        self.service = ScriptedService()
        config = Config(frontend=front, limits=LimitsConfig(**(limits or {})))
        self.app = build_app(config, plugins, self.lifecycle)
        self.lifecycle.ready(self.service)
        self.http = self.client("k1")

    def client(self, key: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://t", headers=headers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        task: asyncio.Task[None] = asyncio.create_task(self.app({"type": "lifespan", "state": {}}, asked.get, told.put))  # type: ignore[arg-type]
        await asked.put({"type": "lifespan.startup"})
        assert (await told.get())["type"] == "lifespan.startup.complete"
        try:
            yield
        finally:
            await asked.put({"type": "lifespan.shutdown"})
            await task

    async def upload(self, content: bytes, http: httpx.AsyncClient | None = None, **fields: str) -> httpx.Response:
        form = {"purpose": "batch", **fields}
        return await (http or self.http).post("/v1/files", data=form, files={"file": ("in.jsonl", content)})

    async def create(self, content: bytes, **fields: Any) -> dict[str, Any]:
        """Upload an input and begin a batch of it."""
        file = (await self.upload(content)).json()
        body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h", **fields}
        answer = await self.http.post("/v1/batches", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def batch(self, id: str) -> dict[str, Any]:
        return dict((await self.http.get(f"/v1/batches/{id}")).json())

    async def ended(self, id: str) -> dict[str, Any]:
        """Wait until a batch has ended."""
        while (found := await self.batch(id))["status"] not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.01)
        return found

    async def lines(self, batch: dict[str, Any], which: str) -> list[dict[str, Any]]:
        """Return the lines of a batch's output or error file."""
        id = batch[f"{which}_file_id"]
        if id is None:
            return []
        answer = await self.http.get(f"/v1/files/{id}/content")
        assert answer.status_code == 200
        return [json.loads(text) for text in answer.text.splitlines()]


def ids(lines: Iterable[dict[str, Any]]) -> list[str]:
    return [one["custom_id"] for one in lines]
