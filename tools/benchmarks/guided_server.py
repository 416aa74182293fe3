"""What a constraint costs in a server: output rates of many streams with and without one, and first tokens.

    python -m tools.benchmarks.guided_server ferrule=http://127.0.0.1:8101 vllm=http://127.0.0.1:8102

Any servers with OpenAI's API and one model each; best is one with random weights, whose free output does not end. In
every round each server takes its turn: `--streams` requests without a constraint, as many with a schema of 20 fields,
each of `--tokens` tokens at most, and then one request at a time: free, with the schema seen before, and with one never
seen. The rate is that of the time in which all streams decode. All are medians over the
rounds, times are wall-clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_WORDS = "The list of the members of the club begins with this entry, which has all of its twenty fields in order: "


def schema(name: str = "note") -> dict[str, Any]:
    """20 required fields of the usual types; `name` is that of one more."""
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "string"},
        {"type": "integer"},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    )
    properties = {f"field_{number}": kinds[number % len(kinds)] for number in range(19)} | {name: {"type": "string"}}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@dataclass
class Stream:
    """One answer: when it was asked for, when its parts came, and how many tokens there were."""

    asked: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass
class Figures:
    """Of one server, over the rounds."""

    free: list[float] = field(default_factory=list)  # tokens per second
    constrained: list[float] = field(default_factory=list)
    first_free: list[float] = field(default_factory=list)  # seconds
    first_seen: list[float] = field(default_factory=list)
    first_new: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        free, constrained = statistics.median(self.free), statistics.median(self.constrained)
        ratios = [one / other for one, other in zip(self.constrained, self.free, strict=True)]
        firsts = (1000 * statistics.median(times) for times in (self.first_free, self.first_seen, self.first_new))
        ratio = f"{statistics.median(ratios):.3f}"
        return (
            f"| {name} | {free:.1f} | {constrained:.1f} | {ratio} | {' | '.join(f'{each:.0f} ms' for each in firsts)} |"
        )


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Stream:
    """Send one request and read its answer."""
    found = Stream(time.perf_counter())
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
        if response.status != 200:
            raise SystemExit(f"{url} answers {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                found.tokens = event["usage"]["completion_tokens"]
            elif event.get("choices"):
                found.times.append(time.perf_counter())
    return found


def body(model: str, tokens: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """A request with a prompt of its own, so that no block of it is in the prefix cache."""
    prompt = f"{secrets.token_hex(8)} {_WORDS}"
    options: dict[str, Any] = {"stream_options": {"include_usage": True}, "temperature": 1.0, "max_tokens": tokens}
    return {"model": model, "prompt": prompt, **options, **(extra or {"ignore_eos": True})}


async def rate(session: aiohttp.ClientSession, url: str, bodies: Sequence[dict[str, Any]]) -> float:
    """Tokens per second of all streams together, while all of them decode."""
    found = await asyncio.gather(*(stream(session, url, each) for each in bodies))
    begin, end = max(one.times[0] for one in found), min(one.times[-1] for one in found)
    if end <= begin:
        raise SystemExit(f"{url} did not decode all streams at once: more --tokens, or fewer --streams")
    shares = [sum(begin < time <= end for time in one.times) / len(one.times) for one in found]
    return sum(share * one.tokens for share, one in zip(shares, found, strict=True)) / (end - begin)


async def measure(servers: dict[str, str], streams: int, tokens: int, rounds: int, backend: str | None) -> None:
    figures = {name: Figures() for name in servers}

    def constrained(name: str = "note") -> dict[str, Any]:
        extra: dict[str, Any] = {"structured_outputs": {"json": schema(name)}}
        return {**extra, **({"guided_decoding_backend": backend} if backend else {})}

    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        models = {}
        for name, url in servers.items():
            async with session.get(f"{url}/v1/models") as response:
                models[name] = (await response.json())["data"][0]["id"]
            for extra in (None, constrained()):
                await stream(session, url, body(models[name], 8, extra))
        for turn in range(rounds):
            for name in sorted(servers, reverse=turn % 2 == 1):
                url, model, one = servers[name], models[name], figures[name]
                one.free.append(await rate(session, url, [body(model, tokens) for _ in range(streams)]))
                limited = [body(model, tokens, constrained()) for _ in range(streams)]
                one.constrained.append(await rate(session, url, limited))
                for times, extra in (
                    (one.first_free, None),
                    (one.first_seen, constrained()),
                    (one.first_new, constrained(f"note_{secrets.token_hex(4)}")),
                ):
                    single = await stream(session, url, body(model, 4, extra))
                    times.append(single.times[0] - single.asked)
    print(f"{streams} streams of {tokens} tokens, {rounds} rounds, backend {backend or 'as the server chooses'}")
    print("| server | free, tok/s | constrained, tok/s | ratio | first token, free | schema seen before | new schema |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, one in figures.items():
        print(one.row(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--backend")
    given = parser.parse_args()
    servers = dict(one.split("=", 1) for one in given.servers)
    asyncio.run(measure(servers, given.streams, given.tokens, given.rounds, given.backend))


if __name__ == "__main__":
    main()
