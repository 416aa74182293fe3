"""`--engine-restarts`: what the clients see when an engine dies and another one takes its place."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ferrule_testkit import server as servers

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "seed": 3}
ARGS = ["--served-model-name", "tiny", *servers.WITHOUT_MODEL, *servers.FEW_ROUTES]
ARGS += ["--max-num-seqs", "4", "--api-server-count", "2"]


async def ask(http: aiohttp.ClientSession, url: str, *, stream: bool) -> tuple[int, str, str]:
    """Return (status, text, message of the error)."""
    async with http.post(f"{url}/v1/completions", json={**BODY, "stream": stream}) as response:
        body = await response.text()
    rows = [row.removeprefix("data: ") for row in body.splitlines() if row] if stream else [body]
    events: list[dict[str, Any]] = [json.loads(row) for row in rows if row not in ("[DONE]", ": ping")]
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    errors = [event["error"]["message"] for event in events if "error" in event]
    assert ("[DONE]" in rows) == (stream and response.status == 200 and not errors)
    return response.status, text, "".join(errors)


async def under_load(server: servers.Server, gate: servers.Gate, pid: int) -> tuple[str, list[tuple[int, str, str]]]:
    """Kill the engine when some of 48 requests have tokens and none has all: what one says alone, and what all say."""
    timeout, connector = aiohttp.ClientTimeout(total=240), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        _, alone, _ = await ask(http, server.url, stream=False)
        with gate.shut(after=10):
            before = server.taken()
            works = [asyncio.create_task(ask(http, server.url, stream=number % 2 == 0)) for number in range(48)]
            while server.taken() < before + len(works):
                await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
            while server.health() != 503:
                await asyncio.sleep(0.01)
            assert (await ask(http, server.url, stream=False))[0] == 503
        return alone, await asyncio.gather(*works)


async def restarts(server: servers.Server) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}/metrics") as response:
        rows = [row for row in (await response.text()).splitlines() if row.startswith("ferrule:engine_restarts_total")]
    return float(rows[0].rpartition(" ")[2])


def test_an_engine_is_replaced_once_and_the_next_death_is_the_end(tiny_llama: Path, tmp_path: Path) -> None:
    gate = servers.Gate(tmp_path)
    args = [str(tiny_llama), *ARGS, "--engine-restarts", "1", *gate.args]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        first = server.children()["engine"]
        alone, outcomes = asyncio.run(under_load(server, gate, first))
        seen = Counter("whole" if (status, text) == (200, alone) else error for status, text, error in outcomes)
        told = "The engine has stopped; this request cannot be finished."
        assert set(seen) == {"whole", told}
        assert seen["whole"] >= 40  # all but those that ran: few at a time
        assert all(alone.startswith(text) for status, text, error in outcomes if error and status == 200)
        server.wait_healthy()
        assert server.children()["engine"] != first
        assert servers.until(lambda: asyncio.run(restarts(server)) == 1)
        os.kill(server.children()["engine"], signal.SIGKILL)
        assert server.process.wait(240) == 1
        assert "it is not started again" in server.text()


@pytest.mark.slow
def test_an_engine_that_hangs_is_replaced_too_and_a_stop_meanwhile_is_a_failure(
    tiny_llama: Path, tmp_path: Path
) -> None:
    args = [str(tiny_llama), *ARGS, "--engine-restarts", "3", "--watchdog-timeout", "2"]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        os.kill(server.children()["engine"], signal.SIGSTOP)
        assert server.says("the engine has died and is started again")
        assert server.health() == 503
        server.wait_healthy()
        os.kill(server.children()["engine"], signal.SIGKILL)
        assert server.says("restart=2 of=3")
        assert server.stop() == 1
