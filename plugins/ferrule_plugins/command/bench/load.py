"""`ferrule bench serve`: streaming HTTP load on any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ferrule.config.option import opt
from ferrule_plugins.command.bench.figures import random_prompts, report, summary


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """Load on a running server."""

    base_url: str = opt("", "URL of the server. Default: http://HOST:PORT.")
    host: str = opt("127.0.0.1", "Host of the server.")
    port: int = opt(8000, "Port of the server.", ge=1, le=65535)
    model: str | None = opt(None, "Model name. Default: the first of /v1/models.")
    api_key: str | None = opt(None, "Key to send.", secret=True)
    num_prompts: int = opt(100, "Requests to send.", ge=1)
    request_rate: float = opt(0.0, "Poisson arrivals per second; 0 sends as fast as the concurrency allows.", ge=0)
    max_concurrency: int | None = opt(None, "Most requests in flight. Default: no bound.", ge=1)
    random_input_len: int = opt(128, "Prompt tokens.", ge=1)
    random_output_len: int = opt(128, "Output tokens; end-of-sequence is ignored.", ge=1)
    random_prefix_len: int = opt(0, "Tokens at the start that all prompts share.", ge=0)
    min_token_id: int = opt(100, "Lowest id in random prompts.", ge=0)
    max_token_id: int = opt(1000, "Ids in random prompts are below this.", ge=1)
    num_warmups: int = opt(1, "Requests that are sent first and not counted.", ge=0)
    seed: int = opt(0, "Seed of prompts and arrivals.")
    output_json: str | None = opt(None, "File for the figures.")


@dataclass
class Record:
    """What one request saw. Times are perf_counter seconds."""

    start: float
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    end: float = 0.0
    error: str | None = None


def run(options: ServeBench) -> int:
    """Returns 1 when a request failed."""
    base = (options.base_url or f"http://{options.host}:{options.port}").rstrip("/").removesuffix("/v1")
    records, duration, model = asyncio.run(_drive(options, base))
    figures = figures_of(records, duration)
    report(f"bench serve: {model} at {base}", {"model": model, **figures}, options.output_json)
    return 1 if figures["failed"] else 0


async def _drive(options: ServeBench, base: str) -> tuple[list[Record], float, str]:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        model = options.model or await _first_model(session, base)
        prompts = random_prompts(
            options.num_warmups + options.num_prompts,
            options.random_input_len,
            options.random_prefix_len,
            (options.min_token_id, options.max_token_id),
            options.seed,
        )
        bodies = [_body(model, prompt, options.random_output_len) for prompt in prompts]
        for body in bodies[: options.num_warmups]:
            await _one(session, base, body)
        start = time.perf_counter()
        records = await _paced(session, base, bodies[options.num_warmups :], options)
        return records, time.perf_counter() - start, model


async def _first_model(session: aiohttp.ClientSession, base: str) -> str:
    async with session.get(f"{base}/v1/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


def _body(model: str, prompt: list[int], output_len: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _paced(
    session: aiohttp.ClientSession, base: str, bodies: list[dict[str, Any]], options: ServeBench
) -> list[Record]:
    gate = asyncio.Semaphore(options.max_concurrency or len(bodies))
    rng = random.Random(options.seed + 1)

    async def gated(body: dict[str, Any]) -> Record:
        async with gate:
            return await _one(session, base, body)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for body in bodies:
            tasks.append(group.create_task(gated(body)))
            if options.request_rate:
                await asyncio.sleep(rng.expovariate(options.request_rate))
    return [task.result() for task in tasks]


async def _one(session: aiohttp.ClientSession, base: str, body: dict[str, Any]) -> Record:
    record = Record(start=time.perf_counter())
    try:
        async with session.post(f"{base}/v1/completions", json=body) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                await _read(response, record)
    except (aiohttp.ClientError, TimeoutError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.end = time.perf_counter()
    return record


async def _read(response: aiohttp.ClientResponse, record: Record) -> None:
    complete = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter()
        data = line[5:].strip()
        if data == b"[DONE]":
            complete = True
            break
        event = json.loads(data)
        if event.get("error"):
            record.error = str(event["error"])[:200]
            return
        if event.get("choices"):
            record.chunks.append(now)
        usage = event.get("usage")
        if usage:
            record.prompt_tokens = usage["prompt_tokens"]
            record.output_tokens = usage["completion_tokens"]
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not complete:
        record.error = "the stream ended without [DONE]"


def figures_of(records: list[Record], duration: float) -> dict[str, Any]:
    """Latencies are those of completed requests; rates count their tokens over the whole duration (seconds)."""
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
    figures.update(summary("ttft", [r.chunks[0] - r.start for r in done]))
    gaps = [b - a for r in done for a, b in zip(r.chunks, r.chunks[1:], strict=False)]
    figures.update(summary("itl", gaps))
    tpot = [(r.chunks[-1] - r.chunks[0]) / (r.output_tokens - 1) for r in done if r.output_tokens > 1]
    figures.update(summary("tpot", tpot))
    figures.update(summary("e2el", [r.end - r.start for r in done]))
    errors = sorted({r.error for r in records if r.error})
    if errors:
        figures["errors"] = errors[:3]
    return figures
