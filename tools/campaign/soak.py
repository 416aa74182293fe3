"""Mixed load for a long time: ``python -m tools.campaign.soak --minutes 60 [--short] [--faults]``.

Clients stream chats, ask for JSON by schemas that are new half of the time, for several choices and for nonsense, and
leave in the middle. With `--short` every request is another prompt with one token for an answer. With `--faults` the
engine is killed four times, and started again by the server. It ends with status 1 when an answer is not what it was
alone, when memory grows, or when files, threads, blocks or requests are left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from ferrule_testkit import server as servers

MIB = 1 << 20
QUESTIONS = ("Hello!", "Who are you?", "What is 12 plus 30?", "What is the capital of France?", "What can you do?")
_CLIENTS = 16
_MIX = {"chat": 4, "leave": 1, "schema": 2, "many": 1, "wrong": 1}  # shares of requests
_EVERY = 2.0  # seconds between two looks at the processes
_FAULTS = 4
_SETTLES = 30.0  # seconds
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True)
class Size:
    """The resources that a process uses."""

    memory: int  # bytes, resident
    files: int
    threads: int


@dataclass
class Seen:
    """Observations of a run: `sizes` by role of the process, each with the seconds since the start."""

    answers: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    sizes: dict[str, list[tuple[float, Size]]] = field(default_factory=dict)


def size_of(pid: int) -> Size:
    """Return the resources that a process uses. Raises OSError for a process that has ended."""
    place = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (place / "status").read_text(encoding="ascii").splitlines())
    memory = int(fields["VmRSS"].split()[0]) << 10
    return Size(memory, len(list((place / "fd").iterdir())), int(fields["Threads"]))


def growth(points: Sequence[tuple[float, int]], warm: float) -> tuple[int, float]:
    """Return the bytes from the largest size before `warm` seconds to the largest after it, and the slope of the last
    half in bytes an hour (least squares).
    """
    before = [size for when, size in points if when <= warm] or [points[0][1]]
    after = [size for when, size in points if when > warm] or before
    half = [(when, size) for when, size in points if when > points[-1][0] / 2]
    mean_x = sum(when for when, _ in half) / len(half)
    mean_y = sum(size for _, size in half) / len(half)
    spread = sum((when - mean_x) ** 2 for when, _ in half)
    slope = sum((when - mean_x) * (size - mean_y) for when, size in half) / spread if spread else 0.0
    return max(after) - max(before), slope * 3600


class Load:
    """Clients of one server until `deadline`, on the monotonic clock."""

    def __init__(self, server: servers.Server, deadline: float, short: bool, faults: bool) -> None:
        self.seen = Seen()
        self._server = server
        self._deadline = deadline
        self._short = short
        self._faults = faults
        self._alone: Mapping[str, str] = {}

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            self._alone = {question: await self._chat(session, question, None) or "" for question in QUESTIONS}
            await asyncio.gather(*(self._client(session, number) for number in range(_CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < self._deadline:
            kind = "short" if self._short else rng.choices(tuple(_MIX), tuple(_MIX.values()))[0]
            try:
                found = await self._one(session, kind, rng)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                found = type(error).__name__
            self.seen.answers[found] += 1
            if found not in {"right", "left"} and not self._faults:
                self.seen.problems.append(f"{kind}: {found}")
            if found != "right" and self._faults:
                await asyncio.sleep(0.2)

    async def _one(self, session: aiohttp.ClientSession, kind: str, rng: random.Random) -> str:
        if kind in {"chat", "leave"}:
            question = rng.choice(QUESTIONS)
            text = await self._chat(session, question, rng.randrange(1, 20) if kind == "leave" else None)
            if text is None:
                return "left"
            return "right" if text == self._alone[question] else "wrong text" if "error" not in text else text
        if kind == "short":
            return await self._whole(session, {"prompt": f"{rng.random()}", "max_tokens": 1}, 200)
        if kind == "schema":
            name = f"field{rng.randrange(10**9)}" if rng.random() < 0.5 else "field"
            schema = {"type": "object", "properties": {name: {"enum": ["a", "b"]}}, "required": [name]}
            asked = {"prompt": "JSON:", "max_tokens": 40, "guided_json": schema}
            return await self._whole(session, asked, 200)
        if kind == "many":
            return await self._whole(session, {"prompt": "one two", "n": 4, "max_tokens": 8}, 200)
        return await self._whole(session, {"prompt": "x", "max_tokens": -1}, 400)

    async def _whole(self, session: aiohttp.ClientSession, body: Mapping[str, Any], status: int) -> str:
        async with session.post(f"{self._server.url}/v1/completions", json=body) as response:
            await response.read()
            return "right" if response.status == status else f"status {response.status}"

    async def _chat(self, session: aiohttp.ClientSession, question: str, leave_after: int | None) -> str | None:
        """Return the text of a chat; None for a client that left."""
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 40, "stream": True}
        text, events = "", 0
        async with session.post(f"{self._server.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return f"error status {response.status}"
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return text
                if not line.startswith(b"data:"):
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    return "error event"
                text += event["choices"][0]["delta"].get("content") or ""
                events += 1
                if leave_after is not None and events >= leave_after:
                    return None
        return "error: the stream has no end"


async def watch(server: servers.Server, seen: Seen, began: float, deadline: float, faults: bool) -> None:
    """Look at the processes, and kill the engine now and then."""
    blows = [began + (deadline - began) * (number + 1) / (_FAULTS + 1) for number in range(_FAULTS if faults else 0)]
    while time.monotonic() < deadline:
        children = server.children()
        for role, pid in {"launcher": server.process.pid, **children}.items():
            try:
                seen.sizes.setdefault(role, []).append((time.monotonic() - began, size_of(pid)))
            except OSError:
                continue
        if blows and time.monotonic() > blows[0] and "engine" in children:
            blows.pop(0)
            os.kill(children["engine"], signal.SIGKILL)
        await asyncio.sleep(_EVERY)


async def settled(url: str) -> str:
    """Return an empty text once nothing runs, waits or has blocks; else what does."""
    end = time.monotonic() + _SETTLES
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/metrics") as response:
                lines = (await response.text()).splitlines()
            left = [line for line in lines if line.startswith(_GAUGES) and float(line.rsplit(" ", 1)[1])]
            if not left or time.monotonic() > end:
                return "; ".join(left)
            await asyncio.sleep(0.5)


def judge(seen: Seen, before: Mapping[str, Size], after: Mapping[str, Size], faults: bool, warm: float) -> list[str]:
    """Return the problems of the sizes; print the sizes."""
    problems = []
    for role, sizes in sorted(seen.sizes.items()):
        points = [(when, size.memory) for when, size in sizes]
        grown, slope = growth(points, warm)
        print(
            f"{role:10} {points[-1][1] / MIB:7.0f} MiB, {grown / MIB:+.1f} MiB after {warm:.0f} s, "
            f"{slope / MIB:+.1f} MiB an hour in the last half; files {before[role].files} -> {after[role].files}, "
            f"threads {before[role].threads} -> {after[role].threads}"
        )
        if role == "engine" and faults:
            continue  # each is another process
        if grown > 0.05 * points[-1][1] + 64 * MIB:
            problems.append(f"{role} has grown by {grown / MIB:.0f} MiB")
        if after[role].files > before[role].files + 4 or after[role].threads > before[role].threads + 4:
            problems.append(f"{role} has more files or threads than before")
    return problems


def soak(minutes: float, short: bool, faults: bool, folder: Path) -> int:
    args = ["--max-model-len", "512", "--disable-log-requests", "--disable-uvicorn-access-log"]
    args += ["--engine-restarts", str(10 * _FAULTS)] if faults else []
    with servers.running(args, folder / "log", {"FERRULE_CPU_KVCACHE_SPACE": "0.25"}) as server:

        def sizes() -> dict[str, Size]:
            return {role: size_of(pid) for role, pid in {"launcher": server.process.pid, **server.children()}.items()}

        warm_up = Load(server, time.monotonic() + 5, short, faults=False)
        asyncio.run(warm_up.run())
        before, began = sizes(), time.monotonic()
        load = Load(server, began + minutes * 60, short, faults)

        async def together() -> str:
            await asyncio.gather(load.run(), watch(server, load.seen, began, began + minutes * 60, faults))
            return await settled(server.url)

        left = asyncio.run(together())
        seen = load.seen
        seen.problems += judge(seen, before, sizes(), faults, minutes * 60 * 0.2)
        if left:
            seen.problems.append(f"left behind: {left}")
        if (status := server.stop()) != 0:
            seen.problems.append(f"exit status {status}")
    if "wrong text" in seen.answers:
        seen.problems.append(f"{seen.answers['wrong text']} answers with another text")
    for problem in sorted(set(seen.problems))[:20]:
        print(problem)
    total = sum(seen.answers.values())
    most = max(growth([(when, size.memory) for when, size in sizes], minutes * 12)[0] for sizes in seen.sizes.values())
    kinds = ", ".join(f"{count} {name}" for name, count in seen.answers.most_common(5))
    print(f"{total} requests in {minutes:g} min ({kinds}); memory {most / MIB:+.0f} MiB; {len(seen.problems)} problems")
    return 1 if seen.problems else 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.campaign.soak")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--short", action="store_true", help="one token for each of as many prompts as possible")
    parser.add_argument("--faults", action="store_true", help="kill the engine now and then")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        return soak(args.minutes, args.short, args.faults, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
