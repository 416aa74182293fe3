"""First tokens against the gaps between tokens: what the engine's pace and other rules come to.

    python -m tools.benchmarks.frontier [--device bf16]      # a table for each of four workloads, in Markdown
    python -m tools.benchmarks.frontier --server "ferrule=http://127.0.0.1:8000" --server "other=http://127.0.0.1:8001"

A rule is a point, or with a parameter a curve: a whole step of some size for prompts, as peers do; the constant that
the engine had before, two tokens of prompts for each request that decodes; the engine's balance; and its targets
between tokens. Nothing is computed, so a table takes seconds.

With servers the same workloads are sent to each of them, in turns, through the completions API with random token ids.
A gap is then the time between two pieces of a stream. Before the tables each server computes a burst that is not in
them: memory that is used for the first time may come slowly.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import aiohttp

from ferrule.engine.pace import Pace
from ferrule.engine.request import Request
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import CacheGroup, Targets
from ferrule_plugins.command.bench.load import send
from ferrule_plugins.policy.fcfs import FcfsPolicy
from tools.benchmarks.timed import Client, Device, Waits, percentile, run

# Qwen3-0.6B on two cores: AVX-512 with bfloat16, with units of half the width, AVX2 alone, tiles, and 4 bits.
DEVICES = {
    "bf16": Device(),
    "narrow": Device(any=0.035, row=0.002, prompt_token=0.0025),
    "avx2": Device(any=0.06, row=0.011, prompt_token=0.0095),
    "tiles": Device(any=0.035, row=0.0008, prompt_token=0.0004, pair=4e-8),
    "int4": Device(any=0.013, row=0.0006, prompt_token=0.0006),
}


class Constant(Pace):
    """Two tokens for each request that decodes, for 32 at least; all of a step for a burst that is soon over."""

    def tokens(self, decoding: Iterable[Request], prompts: Sequence[Request], budget: int, now: float) -> int:
        decoding = list(decoding)
        burst = len(prompts) >= max(8, 4 * len(decoding)) and sum(each.todo for each in prompts) <= 2 * budget
        return budget if burst or not decoding else min(budget, 2 * max(32, len(decoding)))


def scheduler(pace: type[Pace] | None = None, **more: Any) -> DefaultScheduler:
    limits: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "max_model_len": 4096, **more}
    made = DefaultScheduler(SchedulerLimits(groups=(CacheGroup("full", 16),), num_blocks=8000, **limits), FcfsPolicy())
    if pace is not None:
        made._prefills.pace = pace(made.limits)
    return made


def workloads(rate: float = 0.8) -> dict[str, list[Client]]:
    """Return 32 clients in a closed loop, four long prompts at once, random arrivals, and a long document among chats.

    `rate` is the number of arrivals per second. Its default is 70 % load for Qwen3-0.6B on two cores with AVX-512.
    """
    rng = random.Random(1)
    times, now = [], 0.0
    for _ in range(60):
        now += rng.expovariate(rate)
        times.append(now)
    return {
        "closed loop of 32": [Client(128, rng.randint(64, 192), 4) for _ in range(32)],
        "four prompts of 1,024": [Client(1024, 128) for _ in range(4)],
        "arrivals": [Client(256, 128, 60, times=tuple(times))],
        "documents among chats": [Client(128, 128, 6) for _ in range(8)] + [Client(3800, 32, 3, begin=5.0)],
    }


def rules() -> dict[str, Callable[[], DefaultScheduler]]:
    """Return the schedulers by the names of the table's rows."""
    found: dict[str, Callable[[], DefaultScheduler]] = {}
    for size in (256, 512, 2048):
        found[f"steps of {size}"] = partial(scheduler, max_num_batched_tokens=size)
    found["constant"] = partial(scheduler, Constant, prompt_share=2)
    found["**balance**"] = partial(scheduler, prompt_share=2)
    for target in (0.1, 0.2, 0.4, 0.8):
        wish = Targets(inter_token=target)
        found[f"target {1000 * target:.0f} ms"] = partial(scheduler, prompt_share=2, targets=wish)
    return found


def line(name: str, waits: Waits) -> str:
    """Format a row of the table: first tokens in seconds, gaps in milliseconds."""
    firsts = waits.firsts
    seconds = (sum(firsts) / len(firsts), percentile(firsts, 50), percentile(firsts, 99))
    gaps = (percentile(waits.gaps, 50), percentile(waits.gaps, 99), max(waits.gaps))
    cells = [f"{each:.2f}" for each in seconds] + [f"{1000 * each:.0f}" for each in gaps]
    return f"| {name} | {' | '.join(cells)} | {waits.total:.1f} |"


async def measure(base: str, clients: Sequence[Client], seed: str) -> Waits:
    """Measure how long the clients wait at a server. Raises RuntimeError for a request that fails.

    Prompts are drawn by `seed`: the server finds prompts of a seed that it has seen in its cache.
    """
    waits, rng = Waits(), random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        async with session.get(f"{base}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        began = time.perf_counter()

        async def request(client: Client, at: float) -> None:
            ids = [rng.randint(10, 250) for _ in range(client.prompt)]  # which every vocabulary has
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            body = {"model": model, "prompt": ids, "max_tokens": client.output, "ignore_eos": True, "temperature": 0}
            record = await send(session, f"{base}/v1/completions", {**body, "stream": True})
            if record.error is not None:
                raise RuntimeError(f"{base}: {record.error}")
            waits.first.setdefault(client.prompt, []).append(record.times["ttft"])
            waits.gaps += [after - before for before, after in pairwise(record.chunks)]

        async def loop(client: Client) -> None:
            for _ in range(client.count):
                await request(client, client.begin)

        async with asyncio.TaskGroup() as group:
            for client in clients:
                if not client.times:
                    group.create_task(loop(client))
                for at in client.times:
                    group.create_task(request(client, at))
        waits.total = time.perf_counter() - began
    return waits


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.frontier", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="bf16")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--workload", action="append", choices=list(workloads()), help="default: all")
    parser.add_argument("--rounds", type=int, default=1, help="of the servers, each a row")
    parser.add_argument("--rate", type=float, default=0.8, help="of arrivals, in a second; 70 %% load is a fair one")
    parser.add_argument("--seed", default="0", help="of prompts: another one than before, if the servers still run")
    given = parser.parse_args(arguments)
    servers = {name: url.rstrip("/") for name, url in (each.split("=", 1) for each in given.server)}
    for url in servers.values():
        asyncio.run(measure(url, [Client(128, 16)] * 32, f"before the tables, {given.seed}"))
    for title, clients in workloads(given.rate).items():
        if given.workload and title not in given.workload:
            continue
        print(f"\n{title}\n")
        print("| prompts get | first token, mean, s | p50 | p99 | gap, p50, ms | p99 | longest | all done, s |")
        print("|---|--:|--:|--:|--:|--:|--:|--:|")
        for number, (name, url) in product(range(given.rounds), servers.items()):
            seed = f"{title}, round {number}, {given.seed}"
            print(line(name, asyncio.run(measure(url, clients, seed))), flush=True)
        for name, make in ({} if servers else rules()).items():
            print(line(name, run(make(), clients, DEVICES[given.device])))


if __name__ == "__main__":
    main()
