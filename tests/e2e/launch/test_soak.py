"""Many streams with clients that leave: nothing fails, nothing leaks, and the others' text is that of a solo run."""

from __future__ import annotations

import asyncio
import json
import random
import re
import urllib.request
from pathlib import Path

import aiohttp
import pytest

from ferrule_testkit import server as servers

QUESTIONS = [
    "Hello!",
    "Who are you?",
    "What is 12 plus 30?",
    "What is 77 minus 15?",
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Thank you!",
    "What can you do?",
]


async def ask(session: aiohttp.ClientSession, url: str, question: str, leave_after: int | None) -> str | None:
    """Return the whole text, or None when the client left on purpose."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 60,
        "ignore_eos": True,
        "stream": True,
    }
    text, seen = "", 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                return text
            if not line.startswith(b"data:"):
                continue
            event = json.loads(line[5:])
            assert "error" not in event, event
            text += event["choices"][0]["delta"].get("content") or ""
            seen += 1
            if leave_after is not None and seen >= leave_after:
                return None
    raise AssertionError("the stream ended without [DONE]")


async def soak(url: str, streams: int, asks: int, seed: int) -> tuple[int, int]:
    """Return (survivors, leavers). Each survivor's text is compared. A client that has not left when the answer ends
    survives.
    """
    timeout = aiohttp.ClientTimeout(total=900)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        solo = {question: await ask(session, url, question, None) for question in QUESTIONS}
        counts = [0, 0]

        async def client(number: int) -> None:
            rng = random.Random(seed * 1000 + number)
            for _ in range(asks):
                question = rng.choice(QUESTIONS)
                leave = rng.choice([1, rng.randrange(2, 40)]) if rng.random() < 0.4 else None
                answer = await ask(session, url, question, leave)
                counts[answer is None] += 1
                assert answer is None or answer == solo[question]

        await asyncio.gather(*(client(number) for number in range(streams)))
    return counts[0], counts[1]


def gauge(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=240) as response:
        text = response.read().decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


def settle(url: str) -> None:
    """Check that nothing runs, waits or holds blocks once the last client has gone."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    servers.until(lambda: not any(gauge(url, name) for name in names))
    assert {name: gauge(url, name) for name in names} == dict.fromkeys(names, 0.0)


@pytest.mark.parametrize(
    ("asks", "streams"),
    [(3, 32), pytest.param(100, 64, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["short", "long"],
)
def test_streams_with_disconnects(tmp_path: Path, asks: int, streams: int) -> None:
    """Leave a fifth of all asks with their first event, which always succeeds; others while there are more."""
    args = ["--dtype", "float32", "--max-model-len", "512", *servers.FEW_ROUTES]
    with servers.running(args, tmp_path / "log", {"FERRULE_CPU_KVCACHE_SPACE": "0.25"}) as server:
        survivors, leavers = asyncio.run(soak(server.url, streams, asks, seed=7))
        assert survivors + leavers == streams * asks
        assert survivors > streams * asks / 2
        assert leavers > streams * asks / 8
        settle(server.url)
        assert server.health() == 200
        assert server.stop() == 0
