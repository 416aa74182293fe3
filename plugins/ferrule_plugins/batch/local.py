"""Calls of the server's application in this process: the same checks and routers as a server's, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from ferrule_plugins.batch.rows import AppResponse

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

# Routes that take one request and give one answer. Routes that no router serves cannot be chosen.
BATCH_URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)


async def served_urls(app: App) -> Collection[str]:
    """Return the URLs of BATCH_URLS at which the application answers a POST."""
    found = []
    for url in BATCH_URLS:
        _, headers, _ = await _call(app, "OPTIONS", url, b"")
        if "POST" in headers.get("allow", ""):
            found.append(url)
    return frozenset(found)


async def ask(app: App, url: str, body: bytes, client: str = "run-batch", more: Message | None = None) -> AppResponse:
    """Send a JSON body to the application by POST.

    `client` is the caller's name in the access log. `more` are further keys of the ASGI scope.
    """
    status, headers, content = await _call(app, "POST", url, body, {"client": (client, 0), **(more or {})})
    wait = headers.get("retry-after", "1")
    return AppResponse(status, headers.get("x-request-id", ""), content, float(wait) if wait.isdigit() else 1.0)


async def _call(
    app: App, method: str, url: str, body: bytes, more: Message | None = None
) -> tuple[int, dict[str, str], bytes]:
    scope: Message = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": ("localhost", 0),
        "state": {},
        **(more or {}),
    }
    unread = [body]
    status, headers, pieces = 0, {}, []

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # this client never leaves
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, b"".join(pieces)
