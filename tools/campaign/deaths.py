"""What clients see when processes die, hang or are told to stop, and how long everything takes.

    python -m tools.campaign.deaths [--streams 64] [--model FOLDER] [CASE …]

Each case starts a server, keeps it under streams, whole requests and queued ones, does one thing to one of its
processes, and prints a line. It ends with status 1 when a client was left without an end, got wrong text, or a process
survived.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from ferrule_contrib import tiny
from ferrule_testkit import server as servers

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "seed": 3}
_DEADLINE = 60.0  # seconds after which a client counts as left alone
_RUNNING = 4  # requests that run at a time: the others wait
_WHOLE = "whole"


@dataclass
class Seen:
    """The events after a process was killed, in seconds from that moment."""

    ends: Counter[str] = field(default_factory=Counter)
    last_error: float = 0.0
    refuses: float | None = None  # the first /health that is not 200
    serves: float | None = None  # the first one behind it that is 200
    exits: float | None = None
    status: int | None = None
    survivors: int = 0

    @property
    def failed(self) -> bool:
        return bool(self.survivors or self.ends["no end"] or self.ends["wrong text"])

    def line(self) -> str:
        times = {
            "last error": self.last_error or None,
            "/health 503": self.refuses,
            "serves again": self.serves,
            "exits": self.exits,
        }
        parts = [f"{name} {seconds:.2f} s" for name, seconds in times.items() if seconds is not None]
        ends = ", ".join(f"{count} {end}" for end, count in self.ends.most_common())
        status = "" if self.status is None else f"; status {self.status}"
        left = f"; {self.survivors} PROCESSES SURVIVE" if self.survivors else ""
        return f"{ends}; {', '.join(parts)}{status}{left}"


@dataclass(frozen=True)
class Case:
    """A way to kill processes. `strike` gets the server and pids by role. `exits`: the server ends; else `restarts`
    engines follow at most.
    """

    strike: Callable[[servers.Server, Mapping[str, int]], None]
    exits: bool = True
    restarts: int = 0
    args: tuple[str, ...] = ()


def send(role: str, number: signal.Signals) -> Callable[[servers.Server, Mapping[str, int]], None]:
    def strike(server: servers.Server, pids: Mapping[str, int]) -> None:
        os.kill(server.process.pid if role == "launcher" else pids[role], number)

    return strike


def twice(server: servers.Server, pids: Mapping[str, int]) -> None:
    server.process.send_signal(signal.SIGTERM)
    servers.until(lambda: server.health() == 503, 10)
    server.process.send_signal(signal.SIGTERM)


_QUICK = ("--watchdog-timeout", "5")
CASES = {
    "kill-engine": Case(send("engine", signal.SIGKILL)),
    "kill-engine-restart": Case(send("engine", signal.SIGKILL), exits=False, restarts=1),
    "kill-engine-restart-2-apis": Case(
        send("engine", signal.SIGKILL), exits=False, restarts=1, args=("--api-server-count", "2")
    ),
    "stop-engine": Case(send("engine", signal.SIGSTOP), args=_QUICK),
    "stop-engine-restart": Case(send("engine", signal.SIGSTOP), exits=False, restarts=1, args=_QUICK),
    "kill-api": Case(send("api", signal.SIGKILL)),
    "stop-api": Case(send("api", signal.SIGSTOP), args=_QUICK),
    "kill-launcher": Case(send("launcher", signal.SIGKILL)),
    "sigterm": Case(send("launcher", signal.SIGTERM), args=("--shutdown-timeout", "30")),
    "sigquit": Case(send("launcher", signal.SIGQUIT), args=("--shutdown-timeout", "30")),
    "sigterm-timeout": Case(send("launcher", signal.SIGTERM), args=("--shutdown-timeout", "1")),
    "sigterm-twice": Case(twice, args=("--shutdown-timeout", "30")),
}


async def _ask(http: aiohttp.ClientSession, url: str, stream: bool) -> tuple[str, str]:
    """Return (how a request ended, its text)."""
    body = {**BODY, "stream": stream}
    try:
        async with asyncio.timeout(_DEADLINE), http.post(f"{url}/v1/completions", json=body) as response:
            text = await response.text()
    except TimeoutError:
        return "no end", ""
    except aiohttp.ClientError:
        return "connection cut", ""
    rows = [row.removeprefix("data: ") for row in text.splitlines() if row.startswith(("data: ", "{"))]
    events = [json.loads(row) for row in rows if row != "[DONE]"]
    said = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    if any("error" in event for event in events):
        return ("error event" if stream and response.status == 200 else f"error {response.status}"), said
    return (_WHOLE if not stream or rows[-1] == "[DONE]" else "connection cut"), said


def gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    return True


async def _watch(server: servers.Server, case: Case, began: float, seen: Seen) -> None:
    """Ask for /health until the server has ended, or serves again."""
    while time.monotonic() - began < _DEADLINE and server.process.poll() is None:
        health = await asyncio.to_thread(server.health)
        now = time.monotonic() - began
        if health != 200 and seen.refuses is None:
            seen.refuses = now
        elif health == 200 and seen.refuses is not None and not case.exits:
            seen.serves = now
            return
        await asyncio.sleep(0.02)
    seen.exits, seen.status = time.monotonic() - began, server.process.poll()


async def _under_load(server: servers.Server, gate: servers.Gate, case: Case, count: int) -> Seen:
    seen, timeout = Seen(), aiohttp.ClientTimeout(total=None)
    pids, below = server.children(), servers.descendants(server.process.pid)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        _, alone = await _ask(http, server.url, stream=False)
        began = 0.0

        async def client(stream: bool) -> None:
            end, said = await _ask(http, server.url, stream)
            if not (said == alone if end == _WHOLE else alone.startswith(said)):
                end = "wrong text"
            seen.ends[end] += 1
            if end != _WHOLE:
                seen.last_error = max(seen.last_error, time.monotonic() - began)

        with gate.shut(after=40):
            before = server.taken()
            works = [asyncio.create_task(client(number % 2 == 0)) for number in range(3 * count)]
            while server.taken() < before + len(works):
                await asyncio.sleep(0.01)
            began = time.monotonic()
            await asyncio.to_thread(case.strike, server, pids)
        await asyncio.gather(_watch(server, case, began, seen), *works)
    if case.exits:
        servers.until(lambda: all(map(gone, below)), 5)
        seen.survivors = sum(not gone(pid) for pid in below)
    return seen


def run(name: str, model: str, count: int) -> Seen:
    """Run one case."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        gate = servers.Gate(Path(folder))
        args = [model, "--served-model-name", "tiny", *servers.WITHOUT_MODEL, "--max-num-seqs", str(_RUNNING)]
        args += ["--engine-restarts", str(case.restarts), *gate.args, *case.args]
        with servers.running(args, Path(folder) / "log", {"OMP_NUM_THREADS": "1"}) as server:
            return asyncio.run(_under_load(server, gate, case, count))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.campaign.deaths", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}, or a part of such names")
    parser.add_argument("--streams", type=int, default=64, help="as many whole requests, and as many of either wait")
    parser.add_argument("--model", default=str(tiny.path()), help="whose configuration and tokenizer are used")
    args = parser.parse_args(argv)
    words = args.cases or [""]
    if unknown := [word for word in words if not any(word in name for name in CASES)]:
        parser.error(f"there is no case {unknown[0]!r}")
    failed = False
    for name in (name for name in CASES if any(word in name for word in words)):
        seen = run(name, args.model, args.streams)
        failed = failed or seen.failed
        print(f"{name}: {seen.line()}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
