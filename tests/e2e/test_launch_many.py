"""Several API processes: one port, one engine, one queue, one set of figures, one end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ferrule_testkit import server as servers

COUNT = 3
ARGS = ["--dtype", "float32", "--served-model-name", "tiny", "--num-gpu-blocks-override", "512"]
BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0}

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def many(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    args = [str(tiny_llama), *ARGS, "-asc", str(COUNT), "--enable-server-load-tracking"]
    env = {"OMP_NUM_THREADS": "1", "FERRULE_SERVER_DEV_MODE": "1"}
    with servers.running(args, tmp_path_factory.mktemp("many") / "log", env) as running:
        yield running


@pytest.fixture
def fresh(tiny_llama: Path, tmp_path: Path) -> Iterator[servers.Server]:
    args = [str(tiny_llama), *ARGS, "--api-server-count", str(COUNT), "--max-num-seqs", "4", "--watchdog-timeout", "4"]
    args.append("--enable-server-load-tracking")
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as running:
        yield running


def session() -> aiohttp.ClientSession:
    """A new connection for each call: whichever process accepts it answers."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60))


async def post(http: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(url, json={**BODY, **body}) as response:
        return response.status, await response.json()


async def load(http: aiohttp.ClientSession, server: servers.Server) -> int:
    """Requests in flight, of all processes."""
    async with http.get(f"{server.url}/load") as response:
        return int((await response.json())["server_load"])


async def scrape(http: aiohttp.ClientSession, server: servers.Server) -> Figures:
    async with http.get(f"{server.url}/metrics") as response:
        text = await response.text()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(figures: Figures, name: str, **labels: str) -> float:
    return sum(
        value for (found, has), value in figures.items() if found == name and labels.items() <= dict(has).items()
    )


def eventually(condition: Callable[[], bool], timeout: float = 15) -> bool:
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def api_pids(server: servers.Server) -> list[int]:
    found = []
    for pid in servers.descendants(server.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"ferrule.launch.child" in words and b"api" in words:
            found.append(pid)
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_requests_are_spread_and_their_ids_are_unique(many: servers.Server) -> None:
    async def ask() -> list[tuple[int, dict[str, Any]]]:
        async with session() as http:
            found = []
            for _ in range(15):
                found += await asyncio.gather(*(post(http, f"{many.url}/v1/completions") for _ in range(8)))
            return found

    answers = asyncio.run(ask())
    assert {status for status, _ in answers} == {200}
    assert len({body["id"] for _, body in answers}) == len(answers)
    assert len({body["choices"][0]["text"] for _, body in answers}) == 1
    served = Counter(re.findall(r"\[(api-\d) access\] .*POST /v1/completions", many.text()))
    assert set(served) == {f"api-{number}" for number in range(COUNT)}, served


def test_figures_add_up_whichever_process_is_asked(many: servers.Server) -> None:
    async def ask() -> None:
        async with session() as http:
            before = await settled(http)
            await asyncio.gather(*(post(http, f"{many.url}/v1/completions", max_tokens=5) for _ in range(40)))
            views = [await settled(http) for _ in range(12)]
            for view in views:
                grown = {name: total(view, name) - total(before, name) for name in ADDED}
                assert grown == ADDED
                assert total(view, "vllm:num_requests_running") == 0
                assert total(view, "vllm:engine_sleep_state", sleep_state="awake") == 1
                assert total(view, "vllm:cache_config_info") == 1
                assert total(view, "http_requests_total", handler="/v1/completions", status="2xx") == 40 + total(
                    before, "http_requests_total", handler="/v1/completions", status="2xx"
                )
                assert {dict(key[1])["process"] for key in view if key[0] == "process_cpu_seconds_total"} == {
                    f"api-{number}" for number in range(COUNT)
                }
            assert len({len(view) for view in views}) == 1  # no series is a process's own

    async def settled(http: aiohttp.ClientSession) -> Figures:
        """The engine's figures are told once a second."""
        for _ in range(60):
            figures = await scrape(http, many)
            if total(figures, "vllm:generation_tokens_total") == total(
                figures, "vllm:request_generation_tokens_sum"
            ) and not total(figures, "vllm:num_requests_running"):
                return figures
            await asyncio.sleep(0.1)
        raise TimeoutError

    asyncio.run(ask())
    served = set(re.findall(r"\[(api-\d) access\] .*GET /metrics", many.text()))
    assert len(served) > 1, "only one process was ever asked"


ADDED = {
    "vllm:request_success_total": 40,
    "vllm:e2e_request_latency_seconds_count": 40,
    "vllm:time_to_first_token_seconds_count": 40,
    "vllm:inter_token_latency_seconds_count": 160,
    "vllm:generation_tokens_total": 200,
    "vllm:prompt_tokens_total": 120,
}


def test_calls_on_the_engine_work_from_any_process(many: servers.Server) -> None:
    async def ask() -> list[Any]:
        async with session() as http:
            return [await post(http, f"{many.url}/reset_prefix_cache") for _ in range(10)]

    assert {status for status, _ in asyncio.run(ask())} == {200}


def test_load_is_that_of_all_processes(many: servers.Server) -> None:
    async def ask() -> list[int]:
        async with session() as http:
            streams = [asyncio.create_task(post(http, f"{many.url}/v1/completions", max_tokens=200)) for _ in range(24)]
            seen = []
            while not all(stream.done() for stream in streams):
                seen.append(await load(http, many))
            return [*seen, await load(http, many)]

    loads = asyncio.run(ask())
    assert max(loads) > 24 / COUNT * 1.5
    assert loads[-1] == 0


def test_the_queue_is_one_for_all(tiny_llama: Path, tmp_path: Path) -> None:
    """Five may wait: as many are refused as with one process."""
    args = [str(tiny_llama), *ARGS, "-asc", str(COUNT), "--max-num-seqs", "1", "--max-waiting-requests", "5"]

    async def ask(server: servers.Server) -> Counter[int]:
        async with session() as http:
            url = f"{server.url}/v1/completions"
            first = asyncio.create_task(post(http, url, max_tokens=250))
            await asyncio.sleep(0.3)
            rest = await asyncio.gather(*(post(http, url, max_tokens=200) for _ in range(30)))
            await first
            figures = await scrape(http, server)
            refused = sum(status == 429 for status, _ in rest)
            assert total(figures, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == refused
            return Counter(status for status, _ in rest)

    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        statuses = asyncio.run(ask(server))
        assert set(statuses) == {200, 429}
        assert statuses[429] >= 15
        assert server.stop() == 0


def test_the_death_of_one_is_the_end_of_all(fresh: servers.Server) -> None:
    pids = servers.descendants(fresh.process.pid)
    apis = api_pids(fresh)
    assert len(apis) == COUNT
    os.kill(apis[1], signal.SIGKILL)
    assert fresh.process.wait(15) != 0
    assert eventually(lambda: all(gone(pid) for pid in pids), 5)


def test_one_that_hangs_is_ended_and_all_with_it(fresh: servers.Server) -> None:
    """The others serve on until the watchdog's time is up."""
    pids = servers.descendants(fresh.process.pid)
    os.kill(api_pids(fresh)[2], signal.SIGSTOP)
    assert fresh.process.wait(40) != 0
    assert fresh.says("does not react")
    assert eventually(lambda: all(gone(pid) for pid in pids), 5)


def test_sigterm_drains_all(fresh: servers.Server) -> None:
    async def ask() -> list[tuple[int, list[dict[str, Any]], bool]]:
        async with session() as http:
            streams = [asyncio.create_task(stream(http)) for _ in range(12)]
            while (await load(http, fresh)) < 12:
                await asyncio.sleep(0.01)
            fresh.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*streams)

    async def stream(http: aiohttp.ClientSession) -> tuple[int, list[dict[str, Any]], bool]:
        body = {**BODY, "stream": True, "max_tokens": 240}
        async with http.post(f"{fresh.url}/v1/completions", json=body) as response:
            lines = [line async for line in response.content if line.startswith(b"data:")]
            done = lines[-1].startswith(b"data: [DONE]")
            return response.status, [json.loads(line[5:]) for line in lines[: -1 if done else None]], done

    for status, events, done in asyncio.run(ask()):
        assert (status, done) == (200, True)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert fresh.process.wait(40) == 0
    assert len(re.findall(r"\] draining", fresh.text())) == COUNT


def test_what_is_said_once(many: servers.Server) -> None:
    assert len(re.findall(r"ready at http", many.text())) == 1
