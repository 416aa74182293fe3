"""Processor time of a streamed token through each protocol: `python -m tools.benchmarks.protocols [--tokens 4000]`.

A scripted service takes the place of the engine, so what is measured is the router, its form and the HTTP frame,
without a socket. Rounds alternate between the protocols; shown are medians, and how they compare with chat completions.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from starlette.types import ASGIApp, Message

from ferrule.api.app import build_app
from ferrule.api.lifecycle import Lifecycle
from ferrule.config import Config, FrontendConfig
from ferrule.interfaces.parsers import Content
from ferrule.interfaces.service import Generate, Output, Usage
from ferrule.plugin import discover
from ferrule.types import FinishReason
from ferrule_testkit.service import ScriptedService

_MESSAGES = [{"role": "user", "content": "hello"}]
CALLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "chat completions": ("/v1/chat/completions", {"messages": _MESSAGES}),
    "messages": ("/v1/messages", {"model": "fake", "max_tokens": 9, "messages": _MESSAGES}),
    "responses": ("/v1/responses", {"input": "hello", "store": False}),
    "responses, stored": ("/v1/responses", {"input": "hello"}),
    "ollama": ("/api/chat", {"model": "fake", "messages": _MESSAGES}),
    "tgi": ("/generate_stream", {"inputs": "hello"}),
}
_FIRST = "chat completions"


def application(tokens: int) -> ASGIApp:
    """Return the application over a service whose every answer has so many tokens, each an output of its own."""

    def script(request: Generate, index: int, ids: tuple[int, ...]) -> Sequence[Output]:
        usage = Usage(prompt_tokens=len(ids), completion_tokens=tokens)
        parts = [Output(index=index, first=not n, events=(Content(" word"),), usage=usage) for n in range(tokens)]
        return [*parts, Output(index=index, usage=usage, finish=FinishReason.STOP)]

    lifecycle = Lifecycle()
    app = build_app(
        Config(frontend=FrontendConfig(disable_uvicorn_access_log=True, routers=("+tgi",))), discover(), lifecycle
    )
    lifecycle.ready(ScriptedService(script))
    return app


async def seconds(app: ASGIApp, path: str, body: Mapping[str, Any]) -> float:
    """Return the processor time of one streamed answer. Raises RuntimeError where it is not one."""
    content = json.dumps({**body, "stream": True}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), "host": "localhost"}
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "state": {},
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    inbox: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    status = 0

    async def receive() -> Message:
        if inbox:
            return inbox.pop()
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    gc.collect()
    start = time.process_time()
    await app(scope, receive, send)
    taken = time.process_time() - start
    if status != 200:
        raise RuntimeError(f"{path} answers {status}")
    return taken


async def measure(tokens: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a token, by protocol: the median of the rounds."""
    app = application(tokens)
    found: dict[str, list[float]] = {name: [] for name in CALLS}
    for _ in range(rounds + 1):
        for name, (path, body) in CALLS.items():
            found[name].append(await seconds(app, path, body) / tokens)
    return {name: median(values[1:]) for name, values in found.items()}  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000, help="Tokens of an answer.")
    parser.add_argument("--rounds", type=int, default=9, help="Rounds of which the median is shown.")
    given = parser.parse_args()
    found = asyncio.run(measure(given.tokens, given.rounds))
    print(f"{'protocol':<20} {'µs a token':>10} {'of chat':>8}")
    for name, value in found.items():
        print(f"{name:<20} {value * 1e6:10.1f} {value / found[_FIRST]:8.2f}")


if __name__ == "__main__":
    main()
