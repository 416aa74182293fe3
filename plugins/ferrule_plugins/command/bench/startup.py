"""`ferrule bench startup`: from the start of the process to the first healthy answer, and to the first token.

The first request pays for the work that a server puts off until it is needed, so its times are shown beside those of
the third request, which is the same.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from ferrule.config.option import opt
from ferrule_plugins.command.bench.figures import report
from ferrule_plugins.command.bench.load import Record, send
from ferrule_plugins.command.http_client import open_session

_TOKENS = 8  # of a request
_REQUESTS = 3


@dataclass(frozen=True, kw_only=True)
class StartupBench:
    """Options of the start-up benchmark. Options after -- are passed to `ferrule serve`."""

    runs: int = opt(3, "Number of starts to measure.", ge=1)
    timeout: float = opt(600.0, "Seconds to wait until the server is ready.", gt=0)
    output_json: str | None = opt(None, "File to which the figures are written, as JSON.")


def run(options: StartupBench, serve: Sequence[str]) -> int:
    """Start the server `options.runs` times; print medians of seconds."""
    rows = [_once(list(serve), options.timeout) for _ in range(options.runs)]
    figures: dict[str, Any] = {f"{name}_s": round(median(row[name] for row in rows), 3) for name in rows[0]}
    figures["peak_rss_mib"] = figures.pop("rss_s")
    figures["runs"] = options.runs
    report(f"bench startup: ferrule serve {' '.join(serve)}".rstrip(), figures, options.output_json)
    return 0


def _once(serve: list[str], timeout: float) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    start = time.perf_counter()
    address = ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    server = subprocess.Popen([sys.executable, "-m", "ferrule", "serve", *serve, *address], stdout=subprocess.DEVNULL)
    try:
        healthy, records = asyncio.run(_ask(server, port, start, timeout))
        first, *_, later = records
        return {
            "health_200": healthy - start,
            "first_token": first.chunks[0] - start,
            "first_request_first_token": first.chunks[0] - first.start,
            "first_request": first.end - first.start,
            "later_request_first_token": later.chunks[0] - later.start,
            "later_request": later.end - later.start,
            "rss": _tree_rss(server.pid),
        }
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


async def _ask(server: subprocess.Popen[bytes], port: int, start: float, timeout: float) -> tuple[float, list[Record]]:
    """Wait until the server is healthy, and send the same request several times, one after the other.

    Returns the time at which the server was healthy. Raises SystemExit for a server that is not healthy in time, or
    that fails a request.
    """
    asked = {"prompt": "Hello", "max_tokens": _TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    url = f"http://127.0.0.1:{port}"
    async with open_session() as session:
        while not await _is_healthy(session, url):
            if server.poll() is not None:
                raise SystemExit(f"the server ended with status {server.returncode}")
            if time.perf_counter() - start > timeout:
                raise SystemExit(f"not healthy after {timeout:.0f} s")
            await asyncio.sleep(0.01)
        healthy = time.perf_counter()
        records = [await send(session, f"{url}/v1/completions", asked) for _ in range(_REQUESTS)]
    for record in records:
        if record.error or not record.chunks:
            raise SystemExit(f"a request failed: {record.error or 'it was answered without a token'}")
    return healthy, records


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _tree_rss(pid: int) -> float:
    """Return the peak resident memory of a process and its children in MiB, read from /proc; 0.0 where there is no
    /proc.
    """
    kib = 0
    for process in [pid, *_children(pid)]:
        try:
            status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
        except OSError:
            continue
        kib += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)
    return kib / 1024


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, tasks.read_text(encoding="ascii").split()):
            found += [child, *_children(child)]
    return found
