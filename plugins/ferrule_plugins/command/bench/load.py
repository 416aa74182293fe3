"""`ferrule bench serve`: streaming HTTP load on any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ferrule.errors import StartupError
from ferrule.llm.metrics import Counter, read_metrics
from ferrule_plugins.command.bench import limits
from ferrule_plugins.command.bench.figures import PERCENTILES, guess_figures, percentile, report, summary
from ferrule_plugins.command.bench.prompts import Prompts
from ferrule_plugins.command.bench.serve_options import METRICS, ServeBench
from ferrule_plugins.command.http_client import DONE, events, open_session


@dataclass
class Record:
    """The course of one request. Times are perf_counter seconds."""

    start: float
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    end: float = 0.0
    error: str | None = None

    @property
    def times(self) -> dict[str, float]:
        """Seconds of a completed request; a request for one token has a tpot of 0."""
        decoding = self.chunks[-1] - self.chunks[0]
        return {
            "ttft": self.chunks[0] - self.start,
            "tpot": decoding / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0,
            "e2el": self.end - self.start,
        }


def run(options: ServeBench) -> int:
    """Run the benchmark and print its figures, with the machine's limits for a server on this machine.

    Returns 1 when a request failed. Raises ConfigError, StartupError.
    """
    options.check()
    base = (options.base_url or f"http://{options.host}:{options.port}").rstrip("/").removesuffix("/v1")
    machine = limits.measure() if limits.here(base) else None
    try:
        records, duration, card, guessed = asyncio.run(_drive(options, base))
    except aiohttp.ClientError as error:  # before the first request that counts
        raise StartupError(f"No answer from {base}: {error}.", "Check --base-url, or --host and --port.") from None
    model = str(card["id"])
    figures = {"model": model, **figures_of(records, duration, options.shown, options.percentiles), **guessed}
    if options.goals:
        figures["request_goodput"] = goodput(records, duration, options.goals)
    if machine is not None:
        figures.update(near(machine, limits.cost_of(options.checkpoint or card.get("root")), records, duration))
        figures.update(machine.figures)
    kept = figures | options.told(model) | _renamed(figures) if options.save_result else figures
    report(f"bench serve: {model} at {base}", figures, options.file(model), kept)
    return 1 if figures["failed"] else 0


def _renamed(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures under the names that scripts for the documented `bench serve` read."""
    names = {"duration_s": "duration", "prompt_tokens": "total_input_tokens", "output_tokens": "total_output_tokens"}
    return {new: figures[ours] for ours, new in names.items()}


async def _drive(options: ServeBench, base: str) -> tuple[list[Record], float, dict[str, Any], dict[str, float]]:
    async with open_session(options.headers) as session:
        card = await _card(session, base, options.served_model_name or options.model)
        bodies = await Prompts(session, base, str(card["id"]), options).bodies()
        url = base + options.route
        for body in bodies[: options.num_warmups]:
            await send(session, url, body)
        before, start = await _guesses(session, base), time.perf_counter()
        records = await _paced(session, url, bodies[options.num_warmups :], options)
        duration = time.perf_counter() - start
        return (
            records,
            duration,
            card,
            guess_figures(
                *(after - earlier for earlier, after in zip(before, await _guesses(session, base), strict=True))
            ),
        )


async def _guesses(session: aiohttp.ClientSession, base: str) -> list[int]:
    """Return the server's counters of guesses as `guess_figures` takes them; zeros where it does not show them."""
    async with session.get(f"{base}/metrics") as response:
        found = read_metrics(await response.text()) if response.status == 200 else []
    names = [f"vllm:spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    return [sum(one.value for one in found if isinstance(one, Counter) and one.name == name) for name in names]


async def _card(session: aiohttp.ClientSession, base: str, model: str | None) -> dict[str, Any]:
    """Return the server's description of a model, by default of its first; only the name for a model that it does not
    list.
    """
    async with session.get(f"{base}/v1/models") as response:
        response.raise_for_status()
        cards: list[dict[str, Any]] = (await response.json())["data"]
    return next((card for card in cards if model in (None, card["id"])), {"id": model})


async def _paced(
    session: aiohttp.ClientSession, url: str, bodies: list[dict[str, Any]], options: ServeBench
) -> list[Record]:
    gate = asyncio.Semaphore(options.max_concurrency or len(bodies))
    rng = random.Random(options.seed + 1)

    async def gated(body: dict[str, Any]) -> Record:
        async with gate:
            return await send(session, url, body)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for body in bodies:
            tasks.append(group.create_task(gated(body)))
            if options.request_rate:
                shape = options.burstiness
                await asyncio.sleep(rng.gammavariate(shape, 1 / (options.request_rate * shape)))
    return [task.result() for task in tasks]


async def send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Record:
    """Send one request that streams, and read its answer to the end."""
    record = Record(start=time.perf_counter())
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                await _read(response, record)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.end = time.perf_counter()
    return record


async def _read(response: aiohttp.ClientResponse, record: Record) -> None:
    complete = False
    async for data in events(response):
        now = time.perf_counter()
        if data == DONE:
            complete = True
            continue
        event = json.loads(data)
        if event.get("error"):
            record.error = str(event["error"])[:200]
        if event.get("choices"):
            record.chunks.append(now)
        usage = event.get("usage")
        if usage:
            record.prompt_tokens = usage["prompt_tokens"]
            record.output_tokens = usage["completion_tokens"]
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not complete and record.error is None:
        record.error = "the stream ended without [DONE]"


def figures_of(
    records: list[Record],
    duration: float,
    shown: Sequence[str] = METRICS,
    percentiles: Sequence[float] = PERCENTILES,
) -> dict[str, Any]:
    """Return latencies of the completed requests, and rates of their tokens over the whole duration (seconds)."""
    done = [r for r in records if r.error is None and r.chunks]
    outputs = sum(r.output_tokens for r in done)
    prompts = sum(r.prompt_tokens for r in done)
    figures: dict[str, Any] = {
        "completed": len(done),
        "failed": len(records) - len(done),
        "duration_s": round(duration, 3),
        "request_throughput": round(len(done) / duration, 3),
        "output_throughput": round(outputs / duration, 2),
        "total_token_throughput": round((outputs + prompts) / duration, 2),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "cached_tokens": sum(r.cached_tokens for r in done),
    }
    seen = {
        "ttft": [r.times["ttft"] for r in done],
        "tpot": [r.times["tpot"] for r in done if r.output_tokens > 1],
        "itl": [b - a for r in done for a, b in zip(r.chunks, r.chunks[1:], strict=False)],
        "e2el": [r.times["e2el"] for r in done],
    }
    for name in shown:
        figures.update(summary(name, seen[name], percentiles))
    errors = sorted({r.error for r in records if r.error})
    if errors:
        figures["errors"] = errors[:3]
    return figures


def goodput(records: Sequence[Record], duration: float, goals: Mapping[str, float]) -> float:
    """Return the number of completed requests per second of which no time exceeds its goal (milliseconds).

    Source: DistServe, arXiv:2401.09670.
    """
    done = [r.times for r in records if r.error is None and r.chunks]
    good = sum(all(times[name] * 1e3 <= goal for name, goal in goals.items()) for times in done)
    return round(good / duration, 3)


def near(machine: limits.Limits, cost: limits.Cost, records: list[Record], duration: float) -> dict[str, float]:
    """Return how near the run came to the machine's limits: decoding by the median step, computing over the whole
    duration.
    """
    done = [r for r in records if r.error is None and r.chunks]
    gaps = [b - a for r in done for a, b in zip(r.chunks, r.chunks[1:], strict=False)]
    found: dict[str, float] = {}
    if gaps:
        rows = sum(r.chunks[-1] - r.chunks[0] for r in done) / duration  # that decode at a time
        context = sum(r.prompt_tokens + r.output_tokens / 2 for r in done) / len(done)
        found = limits.decode_figures(machine, cost, rows, context, percentile(gaps, 50))
    sampled = sum(r.output_tokens for r in done)
    tokens = sampled + sum(r.prompt_tokens - r.cached_tokens for r in done)
    return found | limits.computed("compute", machine, cost, (tokens, sampled), duration)
