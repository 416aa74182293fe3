"""What an open page at `/ui` costs the engine: the share of the engine's processor time that goes into its pictures.

    OMP_NUM_THREADS=1 python -m tools.benchmarks.live --streams 32

The embedded model serves streams in this process, and a picture is asked for once a second, as by the page. The
processor time that pictures take, and noting down steps for them, is compared with that of all of the engine's threads,
so other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Any

from ferrule.client.inline import InlineClient
from ferrule.config.parse import parse
from ferrule.config.resolve import resolve
from ferrule.env import before_libraries, read
from ferrule.live import Live
from ferrule.locate.localise import localise
from ferrule.plugin import discover
from ferrule.types import EngineRequest, TokenSampling
from ferrule_contrib import tiny

_PROMPT = tuple(range(20, 84))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=16_385, help="of the cache")
    given = parser.parse_args()
    before_libraries()
    asyncio.run(_measure(given.streams, given.seconds, given.blocks))


async def _measure(streams: int, seconds: int, blocks: int) -> None:
    plugins = discover()
    options = [str(tiny.path()), "--max-num-seqs", str(streams), "--num-gpu-blocks-override", str(blocks)]
    config = localise(resolve(parse(options, env=read()).config), plugins)
    pictures, notes = _Timed(Live.picture), _Timed(Live.note)
    Live.picture, Live.note = pictures.method, notes.method  # type: ignore[method-assign, assignment]
    client = InlineClient(config, plugins)
    await client.wait_ready()
    if client.loop is None:
        raise RuntimeError("the engine does not run")
    talks = [asyncio.create_task(_talk(client, number)) for number in range(streams)]
    await asyncio.sleep(2)
    begun, steps = _engine_seconds(), (await client.call("stats"))["steps"]
    for _ in range(seconds):
        await client.call("live")
        await asyncio.sleep(1)
    used, steps = _engine_seconds() - begun, (await client.call("stats"))["steps"] - steps
    print(f"{streams} streams, {blocks - 1} blocks, {seconds} pictures, {steps} steps, {used:.1f} processor seconds")
    print(f"a picture: {pictures.mean * 1e3:.2f} ms; noting down a step: {notes.mean * 1e6:.1f} µs")
    print(f"an open page costs {(pictures.spent + notes.spent) / used:.2%}")
    for talk in talks:
        talk.cancel()
    await client.close()


def _engine_seconds() -> float:
    """Return the processor time of all threads but this one, which is the client's."""
    return time.process_time() - time.thread_time()


class _Timed:
    """A method whose calls are timed on the thread that makes them."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.spent, self.calls = 0.0, 0

        def timed(*args: Any) -> Any:
            begun = time.thread_time()
            try:
                return method(*args)
            finally:
                self.spent += time.thread_time() - begun
                self.calls += 1

        self.method = timed

    @property
    def mean(self) -> float:
        return self.spent / max(1, self.calls)


async def _talk(client: InlineClient, number: int) -> None:
    """Keep one stream busy."""
    for again in range(1_000_000):
        work = TokenSampling(seed=number, max_tokens=1900, stop_token_ids=())
        request = EngineRequest(id=f"{number}-{again}", prompt_ids=_PROMPT, work=work, arrival=time.monotonic())
        async for _ in client.generate(request):
            pass


if __name__ == "__main__":
    main()
