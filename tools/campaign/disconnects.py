"""Clients that leave, in every phase: ``python -m tools.campaign.disconnects [--quick]``, a thousand of them.

Each leaves in its own way: with a FIN, an RST or a half-close; from a stream, a whole answer, the queue, a prefill, one
of several choices, or the compilation of a grammar. Behind them nothing runs, waits or has blocks within 5 s, files and
threads are as before, and a reference answer is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tools.campaign.liveness import COMPLETIONS, request
from tools.campaign.running import (
    QUIET,
    SETTLES,
    Figures,
    Target,
    attacked,
    growths,
    options,
    post,
    quiet,
    reference,
    reset,
    sizes,
    strict_limits,
    verdict,
)

_AT_ONCE = 50  # more than run at a time, so that some are in the queue
_RUNNING = 16
_LONG = {"prompt": "one two three", "max_tokens": 2000, "ignore_eos": True, "seed": 7}
WAYS = ("fin", "rst", "half-close")
_FIELDS = tuple(f"field{number}" for number in range(60))


def body_of(phase: str, number: int) -> Mapping[str, Any]:
    """Return a client's request; `number` makes it unlike any other where that matters."""
    if phase == "stream":
        return {**_LONG, "stream": True}
    if phase == "prefill":
        return {**_LONG, "prompt": [5 + (number + place) % 200 for place in range(1500)], "max_tokens": 200}
    if phase == "choices":
        return {**_LONG, "n": 4, "stream": number % 2 == 0}
    if phase == "grammar":
        properties = {f"{name}-{number}": {"type": "string", "pattern": "^[a-z]{1,40}$"} for name in _FIELDS}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return {**_LONG, "guided_json": schema}
    return _LONG


PHASES = ("stream", "whole", "prefill", "choices", "grammar")


@dataclass
class Seen:
    """The outcomes of clients. `left` counts the clients by phase and way; `answered` those that had an answer before
    they left.
    """

    left: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    problems: list[str] = field(default_factory=list)


async def leave(port: int, number: int, rng: random.Random, seen: Seen) -> None:
    """Run one client; after the half-close it waits for the server's end of the connection."""
    phase, way = PHASES[number % len(PHASES)], WAYS[number // len(PHASES) % len(WAYS)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(COMPLETIONS, json.dumps(body_of(phase, number)).encode()))
        if phase in {"stream", "choices"} and rng.random() < 0.5:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.readline(), 5)
        else:
            await asyncio.sleep(rng.random() * 0.3)
        seen.left[f"{phase} {way}"] += 1
        if way == "half-close":
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(SETTLES):
                    while piece := await reader.read(1 << 16):
                        seen.answered += b'"finish_reason":"length"' in piece
    except TimeoutError:
        seen.problems.append(f"{phase}: a half-closed connection is open after {SETTLES:.0f} s")
    except ConnectionError:
        pass  # the server was faster
    finally:
        reset(writer) if way == "rst" else writer.close()


async def attack(server: Target, count: int) -> Figures:
    seen, rng, port = Seen(), random.Random(5), server.port
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> None:
        async with places:
            await leave(port, number, rng, seen)

    await asyncio.gather(*(one(number) for number in range(2 * _AT_ONCE)))  # to warm up
    await quiet(server)
    await post(port, {"prompt": "x", "max_tokens": 1})
    before, expected = sizes(server), await reference(port)
    await asyncio.gather(*(one(number) for number in range(count)))
    took, left = await quiet(server)
    if left:
        seen.problems.append(f"left behind: {left}")
    if took > SETTLES:
        seen.problems.append(f"all is given back after {took:.1f} s, at most {SETTLES:.0f}")
    if await reference(port) != expected:
        seen.problems.append("the reference answer is another one")
    await asyncio.sleep(6.0)  # connections and threads that are kept for a while
    grown, wrong = growths(before, sizes(server))
    seen.problems += wrong
    print(f"left: {dict(sorted(seen.left.items()))}, {seen.answered} of them answered")
    figures = f"{count} clients left, all given back after {took:.1f} s (bound {SETTLES:.0f}); {grown}"
    return figures, seen.problems


def main(argv: Sequence[str]) -> int:
    count = 100 if options("disconnects", __doc__, argv) else 1000
    args = [*QUIET, "--max-num-seqs", str(_RUNNING), "--max-num-batched-tokens", "256"]
    with tempfile.TemporaryDirectory(prefix="disconnects-") as folder:
        return verdict(*attacked(partial(attack, count=count), args, Path(folder) / "log", strict_limits()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
