"""What clients can make an API process keep: bodies that never end, answers that nobody reads.

    python -m tools.campaign.memory [--quick] [ATTACK …]

A server is started for all attacks. Printed are the statuses that came back, how far the memory of its API process
rose, and the slowest `/health` meanwhile. The exit status is 1 when it rose beyond the attack's bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tools.campaign.running import QUIET, Figures, Target, attacked, verdict
from tools.campaign.soak import MIB

Statuses = Counter[str]

# Connections, MiB that each sends, seconds for which it is kept up, and the most MiB that the process may take for all
# of them: the limit of --max-buffered-bytes, or what one body is allowed.
ATTACKS = {
    "held": (40, 31, 20, 512),
    "slow": (200, 31, 20, 512),
    "aborted": (40, 31, 20, 512),
    "ids": (1, 26, 20, 64),
    "unread": (100, 31, 20, 512),
}


class Cost(NamedTuple):
    """The cost of an attack. `rise` and `rest` in MiB, at most and two seconds after the end; `slowest` in ms."""

    rise: float
    rest: float
    slowest: float


class Attack:
    """Connections to a server on this machine. `size` in bytes, `seconds` for which something is kept up."""

    def __init__(self, port: int, count: int, size: int, seconds: float, path: str = "/v1/completions") -> None:
        self.port = port
        self.count = count
        self.size = size
        self.seconds = seconds
        self.path = path
        self.statuses: Statuses = Counter()

    async def held(self) -> None:
        """Send bodies of which all but the last byte comes."""
        await self._all(lambda: self._upload(self.size - 1, pause=0.0))

    async def slow(self) -> None:
        """Send bodies at 64 KiB a second."""
        await self._all(lambda: self._upload(self.size, pause=1.0))

    async def aborted(self) -> None:
        """Send bodies whose client leaves in the middle."""
        await self._all(lambda: self._upload(self.size // 2, pause=0.0, stay=False))

    async def ids(self) -> None:
        """Send whole bodies of token ids."""
        number = b"123456,"
        body = b'{"prompt":[' + number * (self.size // len(number)) + b"1]}"
        await self._all(lambda: self._post(body))

    async def unread(self) -> None:
        """Open streams of eight choices with logprobs, and read nothing of them."""
        asked = {"prompt": "a b c", "n": 8, "logprobs": 20, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        await self._all(lambda: self._post(body, read=False))

    async def _all(self, one: Callable[[], Awaitable[str]]) -> None:
        async def counted() -> None:
            try:
                self.statuses[await one()] += 1
            except OSError as error:
                self.statuses[type(error).__name__] += 1

        await asyncio.gather(*(counted() for _ in range(self.count)))

    def _head(self, length: int) -> bytes:
        head = f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {length}\r\n\r\n".encode()

    async def _upload(self, num_bytes: int, pause: float, stay: bool = True) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = asyncio.create_task(reader.readline())
        try:
            writer.write(self._head(self.size) + b'{"prompt":"')
            end = time.monotonic() + self.seconds
            sent = 11
            while sent < num_bytes and not answer.done() and time.monotonic() < end:
                piece = b"x" * min(64 << 10, num_bytes - sent)
                writer.write(piece)
                sent += len(piece)
                with suppress(TimeoutError):
                    await asyncio.wait_for(writer.drain(), 0.5)
                await asyncio.sleep(pause)
            if stay:
                await asyncio.wait([answer], timeout=max(0.0, end - time.monotonic()))
            return status(answer.result()) if answer.done() else "no answer yet"
        finally:
            answer.cancel()
            writer.transport.abort()

    async def _post(self, body: bytes, read: bool = True) -> str:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, limit=1024
        )  # it reads no more than that ahead
        try:
            writer.write(self._head(len(body)) + body)
            if read:
                return status(await reader.readline())
            await asyncio.sleep(self.seconds)
            return "unread"
        finally:
            writer.transport.abort()


def status(line: bytes) -> str:
    return line.split(b" ")[1].decode() if line.count(b" ") > 1 else "closed"


def resident(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def health(port: int) -> float:
    """Return the seconds until `/health` is answered."""
    start = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    await reader.read()
    writer.close()
    return time.monotonic() - start


async def watched(attack: Attack, name: str, pid: int) -> Cost:
    """Run one of the attacks."""
    before = peak = resident(pid)
    slowest = 0.0
    running = asyncio.create_task(getattr(attack, name)())
    asked = asyncio.create_task(health(attack.port))
    while not running.done():
        await asyncio.sleep(0.05)
        peak = max(peak, resident(pid))
        if asked.done():
            slowest = max(slowest, asked.result())
            asked = asyncio.create_task(health(attack.port))
    await running
    slowest = max(slowest, await asked)
    await asyncio.sleep(2.0)
    return Cost((peak - before) / MIB, (resident(pid) - before) / MIB, slowest * 1000)


async def measure(target: Target, names: Sequence[str], quick: bool) -> Figures:
    """Run one attack after the other."""
    said, problems = [], []
    for name in names:
        count, mib, seconds, bound = ATTACKS[name]
        attack = Attack(target.port, count // 4 if quick and count > 4 else count, int(mib * MIB), seconds)
        cost = await watched(attack, name, target.children()["api"])
        print(
            f"{name}: {dict(sorted(attack.statuses.items()))}, memory +{cost.rise:.0f} MiB (at most {bound}), "
            f"+{cost.rest:.0f} MiB afterwards; slowest /health {cost.slowest:.0f} ms",
            flush=True,
        )
        if cost.rise > bound:
            problems.append(f"{name}: memory +{cost.rise:.0f} MiB, at most {bound}")
        said.append(f"{name} +{cost.rise:.0f} of {bound} MiB")
    return "; ".join(said), problems


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.campaign.memory", description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer connections")
    args = parser.parse_args(argv)
    work = partial(measure, names=args.attacks or tuple(ATTACKS), quick=args.quick)
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        return verdict(*attacked(work, QUIET, Path(folder) / "log", {"FERRULE_BODY_TIMEOUT": "30"}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
