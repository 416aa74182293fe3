"""Requests that are aborted at once: ``python -m tools.campaign.aborts [--quick]``, 2,000 of them, and 10,000 races.

First thousands of streams, some that run and most in the queue, are reset within a moment, while another stream goes
on: no gap of it may be longer than a second. Then requests that share one external id are aborted, end and are sent
again, all at the same time. What is answered must be the reference, and nothing may be left.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path

from tools.campaign.liveness import COMPLETIONS, request
from tools.campaign.running import (
    QUIET,
    SETTLES,
    Figures,
    Stream,
    Target,
    attacked,
    growths,
    metric,
    options,
    post,
    quiet,
    reference,
    sizes,
    strict_limits,
    verdict,
)

_GAP = 1.0  # seconds, at most
_AT_ONCE = 50  # races
_LONG = {"prompt": "one two three", "max_tokens": 1900, "ignore_eos": True, "seed": 7, "temperature": 0, "stream": True}
_SHORT = {**_LONG, "max_tokens": 4}


def stream(body: object, request_id: str = "") -> bytes:
    """Return the bytes of a request, with an external id."""
    head, _, rest = request(COMPLETIONS, json.dumps(body).encode()).partition(b"\r\n")
    return head + b"\r\n" + (f"x-request-id: {request_id}\r\n".encode() if request_id else b"") + rest


async def burst(server: Target, count: int) -> Figures:
    """Open `count` streams and reset them together."""
    port, problems = server.port, []
    watched = await Stream.open(port, stream(_LONG))
    await watched.read(1)
    going = asyncio.create_task(watched.read())
    streams = await asyncio.gather(*(Stream.open(port, stream({**_LONG, "seed": n})) for n in range(count)))
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    async with asyncio.timeout(60):
        while sum([await metric(port, name) for name in names]) < count:
            await asyncio.sleep(0.1)
    began = time.monotonic()
    for each in streams:
        each.reset()
    aborting = time.monotonic() - began
    await going
    took, left = await quiet(server)
    alone = await Stream.open(port, stream(_LONG))
    await alone.read()
    if left or took > SETTLES:
        problems.append(f"after {took:.1f} s, at most {SETTLES:.0f}, there is left: {left or 'nothing'}")
    if watched.text != alone.text or not watched.ended:
        problems.append(f"the stream that went on has another text: {watched.text[:80]!r}")
    if watched.gap > _GAP:
        problems.append(f"the stream that went on has a gap of {watched.gap:.2f} s")
    return f"{count} aborted in {1000 * aborting:.0f} ms, longest gap {watched.gap:.2f} s (bound {_GAP:g})", problems


async def races(port: int, count: int) -> Figures:
    """Send requests with one id, and abort each after some of its events, often while it ends."""
    expected = await Stream.open(port, stream(_SHORT))
    await expected.read()
    rng, seen, problems = random.Random(3), Counter[str](), list[str]()
    places = asyncio.Semaphore(_AT_ONCE)

    async def one() -> None:
        async with places:
            made = await Stream.open(port, stream(_SHORT, "again"))
            try:
                async with asyncio.timeout(60):
                    await made.read(rng.choice((0, 1, 3, 4, inf)))
            except (TimeoutError, ConnectionError) as error:
                problems.append(f"race: {error!r}")
            finally:
                made.reset()
            seen["whole" if made.ended else "aborted"] += 1
            if not (made.text == expected.text if made.ended else expected.text.startswith(made.text)):
                problems.append(f"race: {made.text!r}, alone {expected.text!r}")

    await asyncio.gather(*(one() for _ in range(count)))
    return f"{seen['aborted']} of {count} races aborted", problems


async def attack(server: Target, count: int, num_races: int) -> Figures:
    port = server.port
    await races(port, 200)  # to warm up
    _, problems = await burst(server, count)
    await post(port, {"prompt": "x", "max_tokens": 1})
    before, expected = sizes(server), await reference(port)
    figures, wrong = await burst(server, count)
    problems += wrong
    more, wrong = await races(port, num_races)
    problems += wrong
    took, left = await quiet(server)
    if left:
        problems.append(f"left behind: {left} after {took:.1f} s")
    if await reference(port) != expected:
        problems.append("the reference answer is another one")
    await asyncio.sleep(6.0)  # connections and threads that are kept for a while
    grown, wrong = growths(before, sizes(server))
    return f"{figures}; {more}; {grown}", problems + wrong


def main(argv: Sequence[str]) -> int:
    count, num_races = (200, 500) if options("aborts", __doc__, argv) else (2000, 10_000)
    args = [*QUIET, "--max-num-seqs", "32", "--max-waiting-requests", "3000", "--enable-request-id-headers"]
    with tempfile.TemporaryDirectory(prefix="aborts-") as folder:
        work = partial(attack, count=count, num_races=num_races)
        return verdict(*attacked(work, args, Path(folder) / "log", strict_limits()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
