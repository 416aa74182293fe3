"""What the processes do when one of them dies, is told to stop, or finds its port taken."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ferrule_testkit import server as servers

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "temperature": 0}


ARGS = ["--dtype", "float32", "--served-model-name", "tiny", *servers.WITHOUT_MODEL, *servers.FEW_ROUTES]


@pytest.fixture
def gate(tmp_path: Path) -> servers.Gate:
    return servers.Gate(tmp_path)


@pytest.fixture
def fresh(tiny_llama: Path, gate: servers.Gate, tmp_path: Path) -> Iterator[servers.Server]:
    """Run a separate server, which the test may break."""
    args = [str(tiny_llama), *ARGS, "--max-num-seqs", "4", *gate.args]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as running:
        yield running


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], begun: asyncio.Event
) -> tuple[int, list[dict[str, Any]], bool]:
    """Return (status, events, whether [DONE] came). `begun` is set with the first event."""
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
        events: list[dict[str, Any]] = []
        if response.status != 200:
            return response.status, [await response.json()], False
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                return 200, events, True
            if line.startswith(b"data:"):
                events.append(json.loads(line[5:]))
                begun.set()
        return 200, events, False


async def under_load(server: servers.Server, gate: servers.Gate, act: Callable[[], None], count: int = 48) -> list[Any]:
    """Open `count` streams and as many whole requests, act when some have tokens and none has all, and gather what each
    client saw. The gate is shut when `act` is called."""
    timeout, begun = aiohttp.ClientTimeout(total=240), asyncio.Event()
    connector = aiohttp.TCPConnector(limit=0)
    with gate.shut(after=100):
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            clients = [asyncio.create_task(stream(session, server.url, BODY, begun)) for _ in range(count)]
            await asyncio.wait_for(begun.wait(), 120)  # before others may take all four places of the engine
            clients += [asyncio.create_task(whole(session, server.url)) for _ in range(count)]
            while server.taken() < 2 * count:
                await asyncio.sleep(0.01)
            act()
            return await asyncio.gather(*clients, return_exceptions=True)


async def whole(session: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    async with session.post(f"{url}/v1/completions", json=BODY) as response:
        return response.status, await response.json()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.advisory("CVE-2026-114051")
def test_engine_killed_under_load(fresh: servers.Server, gate: servers.Gate) -> None:
    """Tell every client, and end all processes non-zero."""
    pids = fresh.children()
    assert set(pids) == {"engine", "api"}
    outcomes = asyncio.run(under_load(fresh, gate, lambda: os.kill(pids["engine"], signal.SIGKILL)))
    for outcome in outcomes:
        assert not isinstance(outcome, BaseException), outcome
        if len(outcome) == 2:
            status, body = outcome
            assert body["error"]["code"] == status >= 500
        else:
            _, events, done = outcome
            assert events[-1]["error"]["message"]
            assert not done
    assert fresh.process.wait(240) != 0
    assert servers.until(lambda: all(gone(pid) for pid in pids.values()))


def test_engine_death_then_sigterm_is_a_failure(tiny_llama: Path, tmp_path: Path) -> None:
    """Report that the engine is dead, in a server that is to outlive it."""
    env = {"OMP_NUM_THREADS": "1", "FERRULE_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
    with servers.running([str(tiny_llama), *ARGS], tmp_path / "log", env) as server:
        os.kill(server.children()["engine"], signal.SIGKILL)
        assert servers.until(lambda: server.health() == 503)
        assert server.stop() != 0


def test_api_killed_takes_everything_down(fresh: servers.Server) -> None:
    pids = fresh.children()
    os.kill(pids["api"], signal.SIGKILL)
    assert fresh.process.wait(240) != 0
    assert servers.until(lambda: all(gone(pid) for pid in pids.values()))


def test_launcher_killed_leaves_no_survivor(fresh: servers.Server) -> None:
    below = servers.descendants(fresh.process.pid)
    assert len(below) >= 2
    fresh.process.kill()
    assert servers.until(lambda: all(gone(pid) for pid in below))


@pytest.mark.slow  # test_many.py drains two API processes, test_one.py one that is the engine too
def test_sigterm_drains(fresh: servers.Server, gate: servers.Gate) -> None:
    """End streams intact, refuse new work, and exit with 0."""
    refused: list[int] = []

    def stop() -> None:
        fresh.process.send_signal(signal.SIGTERM)
        assert servers.until(lambda: fresh.health() == 503)  # says the launcher, before its processes do
        assert fresh.says("draining open=")
        refused.append(status_of(fresh.url))
        gate.open()

    outcomes = asyncio.run(under_load(fresh, gate, stop, count=4))
    assert refused == [503]
    for status, events, done in outcomes[:4]:
        assert status == 200
        assert done
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert all(status == 200 for status, _ in outcomes[4:])
    assert fresh.process.wait(240) == 0


def status_of(url: str) -> int:
    """Return the status of an answer to work."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(BODY).encode(), {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=240)
    return int(refused.value.code)


def test_second_signal_stops_now(fresh: servers.Server, gate: servers.Gate) -> None:
    """Stop even though the requests cannot end: the gate stays shut."""

    def stop() -> None:
        fresh.process.send_signal(signal.SIGTERM)
        assert servers.until(lambda: fresh.health() == 503)
        fresh.process.send_signal(signal.SIGTERM)
        assert isinstance(fresh.process.wait(120), int)

    asyncio.run(under_load(fresh, gate, stop, count=16))
    assert "second signal, stopping now" in fresh.text()


def test_port_taken_is_said_before_loading(tiny_llama: Path) -> None:
    command = [sys.executable, "-m", "ferrule", "serve", str(tiny_llama), "--host", "127.0.0.1"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        second = subprocess.run(
            [*command, "--port", str(port)], capture_output=True, text=True, timeout=240, check=False
        )
    assert second.returncode == 1
    assert f"port {port}" in second.stderr
    assert "Traceback" not in second.stderr
    assert "engine" not in second.stderr
