"""Connections that do nothing, by the thousand: ``python -m tools.campaign.storm [--quick]``.

1. Clients that send a header byte by byte, and as many that send nothing, beside active ones: the active ones are
   served, at half of their rate alone or more (client and server share the machine), the others closed within 15 s.
2. More connections than --max-connections, and 3. than the processes may open files: no process ends, and once the
   connections are gone the next request is answered. /health is answered throughout in the second case; in the third a
   new connection may have to wait until files are free, so how often it was is only shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tools.campaign.liveness import request
from tools.campaign.running import (
    Figures,
    Target,
    attacked,
    few_files,
    options,
    post,
    reference,
    say,
    simulated,
    strict_limits,
    verdict,
)

_CLOSED = 15.0  # seconds in which a connection without a whole header is closed
_RECOVERS = 15.0  # seconds after the last connection
_FILES = 128  # that each process of the third server may open
_RATE = 0.5  # of the rate alone, at least
_ASKED = {"prompt": "one two three", "max_tokens": 8, "seed": 7}
_LORIS = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: " + b"x" * 1000


@dataclass
class Seen:
    """Observations of one phase. `closed`: seconds until each connection was closed; infinite for never."""

    answers: Counter[int] = field(default_factory=Counter)
    closed: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    unhealthy: int = 0


async def _hold(port: int, seen: Seen, slow: bool) -> None:
    """Hold a connection that sends a byte a second, or nothing."""
    began, took = time.monotonic(), float("inf")
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(4 * _CLOSED):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            began = time.monotonic()
            sending = asyncio.create_task(_drip(writer)) if slow else None
            try:
                with contextlib.suppress(ConnectionError):
                    while await reader.read(1024):
                        pass
                took = time.monotonic() - began
            finally:
                if sending is not None:
                    sending.cancel()
                writer.transport.abort()
    seen.closed.append(took)


async def _drip(writer: asyncio.StreamWriter) -> None:
    for byte in _LORIS:
        writer.write(bytes([byte]))
        await asyncio.sleep(1.0)


async def _active(port: int, seen: Seen, until: float) -> None:
    while time.monotonic() < until:
        seen.answers[(await post(port, _ASKED))[0]] += 1


async def _healthy(port: int, seen: Seen, until: float) -> None:
    while time.monotonic() < until:
        began = time.monotonic()
        status, _ = await say(port, request("/health"), 10.0)
        seen.unhealthy += status != 200
        seen.health.append(time.monotonic() - began)
        await asyncio.sleep(0.1)


async def storm(target: Target, idle: int, active: int, seconds: float) -> Figures:
    """Measure what active clients see alone, and beside the storm. `idle`: connections of each kind."""
    port, alone, beside = target.port, Seen(), Seen()
    await reference(port)
    until = time.monotonic() + seconds
    await asyncio.gather(*(_active(port, alone, until) for _ in range(active)))
    held = [asyncio.create_task(_hold(port, beside, slow)) for slow in (True, False) for _ in range(idle)]
    await asyncio.sleep(2.0)  # until all are connected
    until = time.monotonic() + seconds
    await asyncio.gather(_healthy(port, beside, until), *(_active(port, beside, until) for _ in range(active)))
    await asyncio.gather(*held)
    print(f"storm: {dict(beside.answers)}, alone {dict(alone.answers)}; /health max {max(beside.health):.3f} s")
    share = beside.answers[200] / max(1, alone.answers[200])
    closed = f"closed after {max(beside.closed):.1f} s (bound {_CLOSED:.0f})"
    figures = f"{2 * idle} slow connections {closed}, {active} active at {share:.0%} (bound {_RATE:.0%})"
    return figures, problems_of(alone, beside)


def problems_of(alone: Seen, beside: Seen) -> list[str]:
    """Return the broken promises of a server under the storm."""
    found = [f"active clients: {count} answers {status}" for status, count in beside.answers.items() if status != 200]
    if beside.answers[200] < _RATE * alone.answers[200]:
        found.append(f"{beside.answers[200]} answers, alone {alone.answers[200]}")
    if beside.closed and max(beside.closed) > _CLOSED:
        found.append(f"a slow connection was closed after {max(beside.closed):.1f} s, at most {_CLOSED:.0f}")
    if beside.unhealthy:
        found.append(f"/health: {beside.unhealthy} of {len(beside.health)} times not 200")
    return found


async def crowd(target: Target, count: int, name: str, healthy: bool) -> Figures:
    """Open `count` silent connections at a server that has no room for them. `healthy`: /health must be answered."""
    port, seen = target.port, Seen()
    with few_files(count + 100):  # of this process, whose own may be as few as the server's
        expected, pids = await reference(port), target.children()
        asking = asyncio.create_task(_healthy(port, seen, time.monotonic() + 6))
        await asyncio.gather(*(_hold(port, seen, slow=False) for _ in range(count)), asking)
        began, recovered = time.monotonic(), ""
        while recovered != expected and time.monotonic() - began < 2 * _RECOVERS:
            with contextlib.suppress(RuntimeError):
                recovered = await reference(port)
    took = time.monotonic() - began
    problems = []
    if target.children() != pids or recovered != expected:
        problems.append(f"{name}: other processes, or not the same answer afterwards")
    if took > _RECOVERS:
        problems.append(f"{name}: answers again after {took:.1f} s, at most {_RECOVERS:.0f}")
    print(f"{name}: /health {seen.unhealthy} of {len(seen.health)} times not 200, max {max(seen.health):.3f} s")
    if healthy and seen.unhealthy:
        problems.append(f"{name}: /health {seen.unhealthy} of {len(seen.health)} times not 200")
    if max(seen.closed) > 2 * _CLOSED:
        problems.append(f"{name}: a connection was closed after {max(seen.closed):.1f} s")
    return f"{name}: answers again after {took:.1f} s", problems


def run(quick: bool, folder: Path) -> int:
    idle, active, seconds = (100, 20, 5.0) if quick else (1000, 200, 20.0)
    most, env = 60 if quick else 600, strict_limits()
    work = partial(storm, idle=idle, active=active, seconds=seconds)
    found = [attacked(work, simulated(0.01), folder / "log", env)]
    name = f"--max-connections {most}, {2 * most} connections"
    work = partial(crowd, count=2 * most, name=name, healthy=True)
    found.append(attacked(work, [*simulated(), "--max-connections", str(most)], folder / "log2", env))
    work = partial(crowd, count=5 * _FILES, name=f"{_FILES} files, {5 * _FILES} connections", healthy=False)
    with few_files(_FILES):
        found.append(attacked(work, simulated(), folder / "log3", env))
    figures = "; ".join(figures for figures, _ in found)
    return verdict(f"{figures} (bound {_RECOVERS:.0f} s)", [problem for _, problems in found for problem in problems])


def main(argv: Sequence[str]) -> int:
    quick = options("storm", __doc__, argv)
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        return run(quick, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
