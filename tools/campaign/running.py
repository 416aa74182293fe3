"""What drivers share that attack a running server: plain HTTP over a socket, a reference answer, a victim beside every
attack, and what processes take.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from ferrule_testkit import server as servers
from tools.campaign.liveness import COMPLETIONS, request
from tools.campaign.soak import MIB, Size, settled, size_of
from tools.campaign.victim import Victim, beside

QUIET = ("--disable-log-requests", "--disable-uvicorn-access-log")
SETTLES = 5.0  # seconds after the last client in which everything is given back
_PATIENCE = 60.0  # seconds for one answer
_SPARE = 4  # files, and threads, that a process may keep: pools that grow once, and connections that are being closed
_REFERENCE = {"prompt": "one two three", "max_tokens": 24, "temperature": 0, "seed": 7, "ignore_eos": True}

_LINGER = struct.pack("ii", 1, 0)  # closing sends an RST

Answer = tuple[int, bytes]  # status and body; 0 without an answer
Figures = tuple[str, list[str]]  # what a driver measured, in a line, and what is wrong


@dataclass
class Target(servers.Server):
    """A server with a victim."""

    victim: Victim


def attacked(
    attack: Callable[[Target], Awaitable[Figures]],
    args: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    key: str = "",
) -> Figures:
    """Start a server, attack it beside a victim, and end it. Every attack on a server that must survive it goes
    through here. What the victim met is wrong, too, and so is a traceback in the log. `key`: the victim's API key.
    """
    with servers.running(args, log, env) as server:
        with beside(server.port, key) as victim:
            target = Target(server.process, server.port, server.log, victim)
            figures, problems = asyncio.run(_awaited(attack(target)))
        problems = [*problems, *victim.seen.problems, *tracebacks(server)]
    return figures, problems


async def _awaited(work: Awaitable[Figures]) -> Figures:
    return await work


def simulated(step_seconds: float = 0.0) -> tuple[str, ...]:
    """Return the options of a server without a model, whose steps take `step_seconds` each."""
    extra = json.dumps({"step_seconds": step_seconds})
    return (*servers.WITHOUT_MODEL, "--model-loader-extra-config", extra, *QUIET)


def strict_limits() -> dict[str, str]:
    """Return the environment of a server with its default limits; the test kit's are for busy machines."""
    limits = {"FERRULE_HEADER_TIMEOUT": "10", "FERRULE_BODY_TIMEOUT": "30", "FERRULE_KEEP_ALIVE_TIMEOUT": "5"}
    return {**limits, "FERRULE_TEMPLATE_TIMEOUT": "10", "FERRULE_SHUTDOWN_TIMEOUT": "20", "OMP_NUM_THREADS": "1"}


def options(name: str, doc: str | None, argv: Sequence[str]) -> bool:
    """Return whether a quick run is asked for. Raises the limit on open files, since drivers hold thousands of
    connections.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tools.campaign.{name}", description=doc)
    parser.add_argument("--quick", action="store_true", help="a smaller version, of a minute")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return bool(parser.parse_args(argv).quick)


@contextlib.contextmanager
def few_files(count: int) -> Iterator[None]:
    """Limit processes that are started in the block to `count` open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def verdict(figures: str, problems: Sequence[str]) -> int:
    """Print what was wrong, and the line that stands for the run; the exit status."""
    for problem in sorted(set(problems))[:20]:
        print(f"PROBLEM: {problem}")
    print(figures if not problems else f"{len(problems)} problems, such as: {problems[0]}; {figures}", flush=True)
    return 1 if problems else 0


def tracebacks(server: servers.Server) -> list[str]:
    """Return the problems of the log; print its first traceback."""
    before, found, after = server.text().partition("Traceback")
    if found:
        print("".join(f"    | {line}\n" for line in (*before.splitlines()[-3:], found, *after.splitlines()[1:40])))
    return ["there is a traceback in the log"] if found else []


async def say(port: int, message: bytes, patience: float = _PATIENCE) -> Answer:
    """Send bytes on a new connection, and read until the server closes it."""
    head, _, body = (await exchange(port, message, patience)).partition(b"\r\n\r\n")
    return (int(head[9:12]) if head[9:12].isdigit() else 0), body


async def exchange(port: int, message: bytes, patience: float = _PATIENCE) -> bytes:
    """Return the whole response, with its head; empty without an answer."""
    answer = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(message)
                while piece := await reader.read(1 << 16):
                    answer += piece
            finally:
                writer.transport.abort()
    return answer


async def post(port: int, body: Mapping[str, Any], path: str = COMPLETIONS, patience: float = _PATIENCE) -> Answer:
    return await say(port, request(path, json.dumps(body).encode()), patience)


async def reference(port: int) -> str:
    """Return the text of a fixed request. Raises RuntimeError where it is not answered."""
    status, body = await post(port, _REFERENCE)
    if status != 200:
        raise RuntimeError(f"the reference request is answered {status}: {body[:200]!r}")
    return str(json.loads(body)["choices"][0]["text"])


async def metric(port: int, name: str, *labels: str) -> float:
    """Return the sum of a metric's values that have all the labels, such as `key="alice"`."""
    _, body = await say(port, request("/metrics"))
    lines = [line for line in body.decode().splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))


def sizes(server: servers.Server) -> dict[str, Size]:
    """Return the sizes of a server's processes by role."""
    found = {}
    for role, pid in {"launcher": server.process.pid, **server.children()}.items():
        with contextlib.suppress(OSError):
            found[role] = size_of(pid)
    return found


def growths(before: Mapping[str, Size], after: Mapping[str, Size]) -> tuple[str, list[str]]:
    """Return a text about the growth of processes, and its problems: memory over 5 % + 64 MiB, files, threads."""
    shown, problems = [], []
    for role, old in before.items():
        if (new := after.get(role)) is None:
            problems.append(f"there is no {role} any more")
            continue
        grown = new.memory - old.memory
        shown.append(
            f"{role} {grown / MIB:+.0f} MiB {new.files - old.files:+} fds {new.threads - old.threads:+} threads"
        )
        if grown > 0.05 * old.memory + 64 * MIB:
            problems.append(f"{role} has grown by {grown / MIB:.0f} MiB, from {old.memory / MIB:.0f}")
        if new.files > old.files + _SPARE or new.threads > old.threads + _SPARE:
            problems.append(f"{role} has {new.files - old.files:+} files and {new.threads - old.threads:+} threads")
    return ", ".join(shown), problems


async def quiet(target: Target) -> tuple[float, str]:
    """Return the seconds until nothing runs, waits or has blocks, the victim apart; and what is left after the longest
    wait.
    """
    await asyncio.to_thread(target.victim.pause)
    try:
        began = time.monotonic()
        left = await settled(target.url)
        return time.monotonic() - began, left
    finally:
        target.victim.go_on()


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with an RST."""
    place: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        place.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
    writer.transport.abort()


class Stream:
    """One connection with a request, and what came of it. `gap` is the longest between two events, in seconds."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.text, self.gap, self.ended = "", 0.0, False
        self._last = 0.0  # when the last event came

    @classmethod
    async def open(cls, port: int, message: bytes) -> Stream:
        made = cls(*await asyncio.open_connection("127.0.0.1", port))
        made._writer.write(message)
        return made

    async def read(self, events: float = inf) -> None:
        """Read so many events more, or to the end of the stream."""
        while events and (line := await self._reader.readline()):
            if line.startswith(b"data: {"):
                event, now = json.loads(line[6:]), time.monotonic()
                self.text += event["choices"][0]["text"] if event.get("choices") else repr(event)
                self.gap, self._last = max(self.gap, now - (self._last or now)), now
                events -= 1
            self.ended = self.ended or line.startswith(b"data: [DONE]")

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        reset(self._writer)
