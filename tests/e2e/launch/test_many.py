"""Several API processes: one port, one engine, one queue, one set of figures, one end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ferrule_testkit import server as servers

COUNT = 2
ARGS = ["--served-model-name", "tiny", *servers.WITHOUT_MODEL, "--num-gpu-blocks-override", "512"]
BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0, "seed": 1}

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> servers.Gate:
    """Make the gate of `many`."""
    return servers.Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def many(tiny_llama: Path, held: servers.Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    args = [str(tiny_llama), *ARGS, "-asc", str(COUNT), "--enable-server-load-tracking", *held.args]
    args += [*servers.FEW_ROUTES, "admin"]
    env = {"OMP_NUM_THREADS": "1", "FERRULE_SERVER_DEV_MODE": "1"}
    with servers.running(args, tmp_path_factory.mktemp("many") / "log", env) as running:
        yield running


@contextmanager
def several(tiny_llama: Path, folder: Path, *more: str) -> Iterator[servers.Server]:
    """Run a separate server for a test."""
    args = [str(tiny_llama), *ARGS, "--api-server-count", str(COUNT), *servers.FEW_ROUTES, *more]
    with servers.running(args, folder / "log", {"OMP_NUM_THREADS": "1"}) as running:
        yield running


def session() -> aiohttp.ClientSession:
    """Open a session with a new connection for each call: whichever process accepts it answers."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=240))


async def post(http: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(url, json={**BODY, **body}) as response:
        return response.status, await response.json()


async def load(http: aiohttp.ClientSession, server: servers.Server) -> int:
    """Return the number of requests in flight, of all processes."""
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


def those_who_answered(server: servers.Server, call: str) -> Counter[str]:
    """Return how many calls each API process answered, by the log."""
    return Counter(re.findall(rf"\[(api-\d) access\] .*{call}", server.text()))


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
    assert servers.until(lambda: those_who_answered(many, "POST /v1/completions").total() == len(answers))
    served = those_who_answered(many, "POST /v1/completions")
    assert set(served) == {f"api-{number}" for number in range(COUNT)}, served


def test_figures_add_up_whichever_process_is_asked(many: servers.Server) -> None:
    async def ask() -> None:
        async with session() as http:
            before = await settled(http)
            await asyncio.gather(*(post(http, f"{many.url}/v1/completions", max_tokens=5) for _ in range(40)))
            await settled(http, calls(before) + 40)
            views = [await scrape(http, many) for _ in range(12)]
            for view in views:
                grown = {name: total(view, name) - total(before, name) for name in ADDED}
                assert grown == ADDED
                assert total(view, "vllm:num_requests_running") == 0
                assert total(view, "vllm:engine_sleep_state", sleep_state="awake") == 1
                assert total(view, "vllm:cache_config_info") == 1
                assert calls(view) == calls(before) + 40
                assert {dict(key[1])["process"] for key in view if key[0] == "process_cpu_seconds_total"} == {
                    f"api-{number}" for number in range(COUNT)
                }
            assert len({len(view) for view in views}) == 1  # no series is a process's own

    def calls(figures: Figures) -> float:
        return total(figures, "http_requests_total", handler="/v1/completions", status="2xx")

    async def settled(http: aiohttp.ClientSession, least: float = 0) -> Figures:
        """Wait until the figures are complete: the engine's come once a second, and a call is counted when its answer
        has gone.
        """
        async with asyncio.timeout(240):
            while True:
                figures = await scrape(http, many)
                made = total(figures, "vllm:generation_tokens_total")
                told = total(figures, "vllm:request_generation_tokens_sum")
                if made == told and calls(figures) >= least and not total(figures, "vllm:num_requests_running"):
                    return figures
                await asyncio.sleep(0.1)

    asyncio.run(ask())
    assert servers.until(lambda: len(those_who_answered(many, "GET /metrics")) > 1), "only one was ever asked"


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


def test_load_is_that_of_all_processes(many: servers.Server, held: servers.Gate) -> None:
    """Hold 24 requests, of which whichever process is asked knows."""

    async def reached(http: aiohttp.ClientSession, wanted: int) -> None:
        async with asyncio.timeout(240):
            while await load(http, many) != wanted:
                await asyncio.sleep(0.01)

    async def ask() -> None:
        async with session() as http:
            with held.shut():
                works = [asyncio.create_task(post(http, f"{many.url}/v1/completions")) for _ in range(24)]
                await reached(http, 24)
                assert {await load(http, many) for _ in range(12)} == {24}
            assert {status for status, _ in await asyncio.gather(*works)} == {200}
            await reached(http, 0)

    asyncio.run(ask())


def test_the_queue_is_one_for_all_and_sigterm_drains_all(tiny_llama: Path, tmp_path: Path) -> None:
    """Let twelve wait, in whichever process: a few more where several count at the same moment. Then end intact what
    streams in each process.
    """
    gate = servers.Gate(tmp_path)

    async def crowd(server: servers.Server) -> Counter[int]:
        async with session() as http:
            with gate.shut():
                asked = {asyncio.create_task(post(http, f"{server.url}/v1/completions")) for _ in range(40)}
                waiting = asked
                while len(waiting) > 12 + COUNT - 1:
                    _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=240)
            statuses = Counter(status for status, _ in await asyncio.gather(*asked))
            figures = await scrape(http, server)
            rejections = total(figures, "vllm:admission_rejections_total", reason="max_num_queued_reqs")
            assert rejections == statuses[429]
            return statuses

    async def drain(server: servers.Server) -> list[tuple[int, list[dict[str, Any]], bool]]:
        before = server.taken()
        async with session() as http:
            with gate.shut(after=20):
                streams = [asyncio.create_task(stream(http, server)) for _ in range(12)]
                while server.taken() < before + 12:
                    await asyncio.sleep(0.01)
                server.process.send_signal(signal.SIGTERM)
                assert servers.until(lambda: draining(server) == COUNT)
            return await asyncio.gather(*streams)

    async def stream(http: aiohttp.ClientSession, server: servers.Server) -> tuple[int, list[dict[str, Any]], bool]:
        body = {**BODY, "stream": True, "max_tokens": 100}
        async with http.post(f"{server.url}/v1/completions", json=body) as response:
            lines = [line async for line in response.content if line.startswith(b"data:")]
            done = lines[-1].startswith(b"data: [DONE]")
            return response.status, [json.loads(line[5:]) for line in lines[: -1 if done else None]], done

    def draining(server: servers.Server) -> int:
        return len(re.findall(r"\] draining", server.text()))

    with several(tiny_llama, tmp_path, "--max-waiting-requests", "12", "--max-num-seqs", "4", *gate.args) as fresh:
        statuses = asyncio.run(crowd(fresh))
        assert set(statuses) == {200, 429}
        assert statuses[429] >= 40 - 12 - (COUNT - 1)
        for status, events, done in asyncio.run(drain(fresh)):
            assert (status, done) == (200, True)
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert fresh.process.wait(240) == 0
        assert draining(fresh) == COUNT


@pytest.mark.slow  # test_processes.py kills the only one
def test_the_death_of_one_is_the_end_of_all(tiny_llama: Path, tmp_path: Path) -> None:
    with several(tiny_llama, tmp_path) as fresh:
        pids = servers.descendants(fresh.process.pid)
        apis = api_pids(fresh)
        assert len(apis) == COUNT
        os.kill(apis[1], signal.SIGKILL)
        assert fresh.process.wait(240) != 0
        assert servers.until(lambda: all(gone(pid) for pid in pids))


def test_one_that_hangs_is_ended_and_all_with_it(tiny_llama: Path, tmp_path: Path) -> None:
    """End all processes by the watchdog, which has time enough for what is slow only because the machine is busy."""
    with several(tiny_llama, tmp_path, "--watchdog-timeout", "6") as fresh:
        pids = servers.descendants(fresh.process.pid)
        os.kill(api_pids(fresh)[1], signal.SIGSTOP)
        assert fresh.process.wait(240) != 0
        assert fresh.says("does not respond")
        assert servers.until(lambda: all(gone(pid) for pid in pids))


def test_what_is_said_once(many: servers.Server) -> None:
    assert many.says("ready at http")
    assert len(re.findall(r"ready at http", many.text())) == 1
