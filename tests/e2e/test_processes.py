"""What the processes do when one of them dies, is told to stop, or finds its port taken."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ferrule_testkit import server as servers

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def fresh(tiny_llama: Path, tmp_path: Path) -> Iterator[servers.Server]:
    """A server of a test's own, which the test may break. Slow enough that its streams are still open when it acts."""
    args = [str(tiny_llama), "--dtype", "float32", "--served-model-name", "tiny", "--max-num-seqs", "4"]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as running:
        yield running


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[int, list[dict[str, Any]], bool]:
    """(status, events, whether [DONE] came)."""
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
        events: list[dict[str, Any]] = []
        if response.status != 200:
            return response.status, [await response.json()], False
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                return 200, events, True
            if line.startswith(b"data:"):
                events.append(json.loads(line[5:]))
        return 200, events, False


async def under_load(server: servers.Server, act: Callable[[], None], count: int = 48) -> list[Any]:
    """Open `count` streams and as many whole requests, act when tokens flow, and gather what each client saw."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def whole() -> Any:
            async with session.post(f"{server.url}/v1/completions", json=BODY) as response:
                return response.status, await response.json()

        streams = [asyncio.create_task(stream(session, server.url, BODY)) for _ in range(count)]
        wholes = [asyncio.create_task(whole()) for _ in range(count)]
        await asyncio.sleep(0.3)
        act()
        return await asyncio.gather(*streams, *wholes, return_exceptions=True)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def test_engine_killed_under_load(fresh: servers.Server) -> None:
    """Every client is told, the server says that it is dead, and all processes end non-zero."""
    pids = fresh.children()
    assert set(pids) == {"engine", "api"}
    codes: list[int] = []

    def kill() -> None:
        os.kill(pids["engine"], signal.SIGKILL)
        time.sleep(0.5)
        codes.append(fresh.health())

    outcomes = asyncio.run(under_load(fresh, kill))
    assert codes == [503]
    told = 0
    for outcome in outcomes:
        assert not isinstance(outcome, BaseException), outcome
        if len(outcome) == 2:  # a whole request: an answer that was complete before, or an error object
            status, body = outcome
            assert status == 200 or body["error"]["code"] == status >= 500
            told += status != 200
        else:
            status, events, done = outcome
            if not done:
                assert events[-1]["error"]["message"]
                told += 1
    assert told > 48
    assert fresh.process.wait(15) != 0
    assert wait_until(lambda: all(gone(pid) for pid in pids.values()), 5)


def test_engine_death_then_sigterm_is_a_failure(fresh: servers.Server) -> None:
    os.kill(fresh.children()["engine"], signal.SIGKILL)
    assert wait_until(lambda: fresh.health() != 200, 5)
    assert fresh.stop() != 0


def test_api_killed_takes_everything_down(fresh: servers.Server) -> None:
    pids = fresh.children()
    os.kill(pids["api"], signal.SIGKILL)
    assert fresh.process.wait(15) != 0
    assert wait_until(lambda: all(gone(pid) for pid in pids.values()), 5)


def test_launcher_killed_leaves_no_survivor(fresh: servers.Server) -> None:
    below = servers.descendants(fresh.process.pid)
    assert len(below) >= 2
    fresh.process.kill()
    assert wait_until(lambda: all(gone(pid) for pid in below), 5)


def test_sigterm_drains(fresh: servers.Server) -> None:
    """Streams end intact, new work is refused, and the status is 0."""
    refused: list[int] = []

    def stop() -> None:
        fresh.process.send_signal(signal.SIGTERM)
        wait_until(lambda: fresh.health() == 503, 5)
        refused.append(fresh.health())

    outcomes = asyncio.run(under_load(fresh, stop, count=4))
    assert refused == [503]
    for status, events, done in outcomes[:4]:
        assert status == 200
        assert done
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert all(status == 200 for status, _ in outcomes[4:])
    assert fresh.process.wait(40) == 0


def test_second_signal_stops_now(fresh: servers.Server) -> None:
    def stop() -> None:
        fresh.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        fresh.process.send_signal(signal.SIGTERM)

    asyncio.run(under_load(fresh, stop, count=16))
    fresh.process.wait(10)
    assert fresh.process.returncode is not None


def test_port_taken_is_said_before_loading(server: servers.Server, tiny_llama: Path) -> None:
    command = [sys.executable, "-m", "ferrule", "serve", str(tiny_llama), "--host", "127.0.0.1"]
    second = subprocess.run(
        [*command, "--port", str(server.port)], capture_output=True, text=True, timeout=240, check=False
    )
    assert second.returncode == 1
    assert f"port {server.port}" in second.stderr
    assert "Traceback" not in second.stderr
    assert "engine" not in second.stderr


def test_one_process_with_disabled_multiprocessing(tiny_llama: Path, tmp_path: Path) -> None:
    args = [str(tiny_llama), "--dtype", "float32", "--disable-frontend-multiprocessing", "--served-model-name", "tiny"]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as running:
        assert running.children() == {}
        outcome = asyncio.run(_one(running.url))
        assert outcome[0] == 200
        assert outcome[2]
        assert running.stop() == 0


async def _one(url: str) -> tuple[int, list[dict[str, Any]], bool]:
    async with aiohttp.ClientSession() as session:
        return await stream(session, url, {**BODY, "max_tokens": 5})
