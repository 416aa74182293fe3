"""`--enable-metrics`: GET /metrics and /health over HTTP, while a batch runs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from ferrule_plugins.batch.local import App

_OPEN = frozenset({"/metrics", "/health", "/ping", "/version"})
_NOT_HERE = b'{"error":{"message":"A batch runs here: there are /metrics and /health.","type":"NotFoundError",'
_NOT_HERE += b'"param":null,"code":404}}'


@asynccontextmanager
async def figures(app: App, listener: socket.socket | None) -> AsyncIterator[None]:
    """Serve the metrics and the health while the block runs; without a listener, serve nothing."""
    if listener is None:
        yield
        return
    server = _Server(
        uvicorn.Config(
            _only_figures(app),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await running


def _only_figures(app: App) -> App:
    """Restrict an application to metrics, health and version: a batch checks no API key, so it must take no other
    request.
    """

    async def chosen(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in _OPEN and scope["method"] in {"GET", "HEAD"}:
            await app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_NOT_HERE)).encode())]
            await send({"type": "http.response.start", "status": 404, "headers": headers})
            await send({"type": "http.response.body", "body": _NOT_HERE})

    return chosen


class _Server(uvicorn.Server):
    """A uvicorn server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
