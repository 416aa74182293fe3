"""Keys with limits, under load: ``python -m tools.campaign.keys [--quick]``.

A server with two API processes has three keys in a file. One floods with far more clients than may be in progress for
it: no more than that are, the rest are answered 429 with Retry-After, and another key's short requests are served as
fast as three times alone, and a step. A third key has tokens for a minute, and gets no more, but for what had begun.
And a prompt that came with one key is not found in the cache by another, though the same key finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tools.campaign.liveness import COMPLETIONS, request
from tools.campaign.running import Figures, Target, attacked, options, quiet, simulated, strict_limits, verdict

_STEP = 0.01  # seconds of a step
_MOST = 4  # requests of the key that floods
_MINUTE = 1500  # tokens of the key that has a budget
_CLIENTS = 64
_SPENDERS = 4
_KEYS = {"flood": "sk-flood-5e8f0", "short": "sk-short-77ab1", "budget": "sk-budget-03cd9", "victim": "sk-victim-c21d4"}
_FILE = {
    "flood": {"key": _KEYS["flood"], "max_requests": _MOST},
    "short": {"key": _KEYS["short"]},
    "budget": {"key": _KEYS["budget"], "tokens_per_minute": _MINUTE},
    "victim": {"key": _KEYS["victim"]},
}
_SLOWER = 3.0  # times the time to the first token alone, at most, and a step
_SHORT = {"prompt": "one two three", "max_tokens": 4, "ignore_eos": True, "seed": 7}
_LONG = {"prompt": "one two three", "max_tokens": 100, "ignore_eos": True, "seed": 7}


@dataclass
class Reply:
    """A reply to a stream. `first`: seconds to the first token; infinite without one."""

    status: int = 0
    retry_after: bool = False
    first: float = float("inf")
    text: str = ""
    tokens: int = 0
    cached: int = 0


@dataclass
class Running:
    """The number of a key's streams that have begun and not ended, now and at most."""

    now: int = 0
    most: int = 0

    @contextlib.contextmanager
    def one(self) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            yield
        finally:
            self.now -= 1


async def ask(port: int, key: str, body: Mapping[str, Any], running: Running | None = None) -> Reply:
    """Send a stream with a key. It counts as running from its first event to the one with its end."""
    began, reply = time.monotonic(), Reply()
    asked = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    message = request(COMPLETIONS, asked).replace(b"host:", f"authorization: Bearer {key}\r\nhost:".encode(), 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    counted = contextlib.ExitStack()
    try:
        writer.write(message)
        async with asyncio.timeout(60):
            while line := await reader.readline():
                if line.startswith(b"HTTP/"):
                    reply.status = int(line[9:12])
                reply.retry_after |= line.lower().startswith(b"retry-after:")
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event.get("choices", ()):
                    if reply.first == float("inf"):
                        reply.first = time.monotonic() - began
                        counted.enter_context((running or Running()).one())
                    reply.text += choice["text"]
                    if choice["finish_reason"]:
                        counted.close()
                if usage := event.get("usage"):
                    reply.tokens = usage["total_tokens"]
                    reply.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (OSError, TimeoutError):
        reply.status = 0
    finally:
        counted.close()
        writer.close()
    return reply


@dataclass
class Seen:
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def note(self, key: str, reply: Reply, may_be_refused: bool) -> None:
        self.statuses[key, reply.status] += 1
        if reply.status not in ({200, 429} if may_be_refused else {200}):
            self.problems.append(f"{key}: an answer {reply.status}")
        if reply.status == 429 and not reply.retry_after:
            self.problems.append(f"{key}: 429 without Retry-After")


async def shorts(port: int, count: int, seen: Seen) -> float:
    """Send short requests, one after the other; return the median of seconds to the first token."""
    firsts = []
    for _ in range(count):
        reply = await ask(port, _KEYS["short"], _SHORT)
        seen.note("short", reply, may_be_refused=False)
        firsts.append(reply.first)
        await asyncio.sleep(0.1)
    return statistics.median(firsts)


async def flood(port: int, count: int, seen: Seen) -> str:
    """Flood with one key, while another one asks; return the figures."""
    alone, running, over = await shorts(port, count, seen), Running(), asyncio.Event()

    async def client() -> None:
        while not over.is_set():
            reply = await ask(port, _KEYS["flood"], _LONG, running)
            seen.note("flood", reply, may_be_refused=True)
            if reply.status == 429:
                await asyncio.sleep(0.5)

    clients = [asyncio.create_task(client()) for _ in range(_CLIENTS)]
    await asyncio.sleep(1.0)
    beside = await shorts(port, count, seen)
    over.set()
    await asyncio.gather(*clients)
    if running.most > _MOST:
        seen.problems.append(f"{running.most} requests of the key that floods ran at once, at most {_MOST} may")
    if not seen.statuses["flood", 200] or not seen.statuses["flood", 429]:
        seen.problems.append(f"the flood was none: {dict(seen.statuses)}")
    if beside > _SLOWER * alone + _STEP:
        seen.problems.append(f"first token of the other key after {beside:.3f} s, alone {alone:.3f} s")
    times = f"first token {beside * 1e3:.0f} ms, alone {alone * 1e3:.0f} ms (bound x{_SLOWER:g} + a step)"
    return f"{running.most} of a flood of {_CLIENTS} ran (bound {_MOST}), other key: {times}"


async def budget(port: int, seconds: float, seen: Seen) -> str:
    """Spend a key's tokens with several clients; return the figures."""
    began, spent, largest = time.monotonic(), 0, 0  # by this clock, the server's minutes are counted, too
    end = began + seconds

    async def client() -> None:
        nonlocal spent, largest
        while time.monotonic() < end:
            reply = await ask(port, _KEYS["budget"], _LONG)
            seen.note("budget", reply, may_be_refused=True)
            spent, largest = spent + reply.tokens, max(largest, reply.tokens)
            if reply.status == 429:
                await asyncio.sleep(0.2)

    await asyncio.gather(*(client() for _ in range(_SPENDERS)))
    minutes = int(time.monotonic() // 60) - int(began // 60) + 1
    bound = minutes * (_MINUTE + _SPENDERS * largest)
    if not _MINUTE / 2 < spent <= bound or not seen.statuses["budget", 429]:
        seen.problems.append(f"{spent} tokens of a key in {minutes} minutes, at most {bound}; {dict(seen.statuses)}")
    return f"{spent} tokens in {minutes} min (bound {bound})"


async def caches(port: int, count: int, seen: Seen) -> str:
    """Send the same prompts with two keys, in a mixed order; return the figures."""
    rng, others, own = random.Random(5), 0, 0
    asks = [(number, key) for number in range(count) for key in ("flood", "short") for _ in range(2)]
    rng.shuffle(asks)
    first: set[tuple[int, str]] = set()
    texts: dict[int, str] = {}
    for number, key in asks:
        prompt = [5 + number % 200, 5 + number // 200, *range(5, 103)]  # like no other from its first block on
        reply = await ask(port, _KEYS[key], {**_SHORT, "prompt": prompt})
        seen.note(key, reply, may_be_refused=False)
        if texts.setdefault(number, reply.text) != reply.text:
            seen.problems.append(f"prompt {number}: another text with the key {key}")
        if (number, key) in first:
            own += reply.cached > 0
        else:
            others += reply.cached
            first.add((number, key))
    if others:
        seen.problems.append(f"{others} tokens were found in the cache that came with another key")
    if own != 2 * count:
        seen.problems.append(f"a key found {own} of {2 * count} of its own prompts in the cache")
    return f"cached tokens across keys {others} (bound 0), own prompts found {own} of {2 * count}"


async def measure(server: Target, quick: bool) -> Figures:
    seen, port = Seen(), server.port
    if (status := (await ask(port, "sk-wrong", _SHORT)).status) != 401:
        seen.problems.append(f"a wrong key is answered {status}")
    figures = [
        await caches(port, 20 if quick else 500, seen),
        await flood(port, 20 if quick else 200, seen),
        await budget(port, 6.0 if quick else 150.0, seen),
    ]
    print(f"answers: {dict(seen.statuses)}")
    _, left = await quiet(server)
    return "; ".join(figures), seen.problems + ([f"left behind: {left}"] if left else [])


def main(argv: Sequence[str]) -> int:
    quick = options("keys", __doc__, argv)
    with tempfile.TemporaryDirectory(prefix="keys-") as name:
        folder = Path(name)
        (folder / "keys.yaml").write_text(json.dumps(_FILE), encoding="utf-8")
        args = [*simulated(_STEP), "--api-key-file", str(folder / "keys.yaml"), "--api-server-count", "2"]
        args += ["--enable-prompt-tokens-details", "--public-metrics", "--max-num-seqs", "16"]
        work = partial(measure, quick=quick)
        return verdict(*attacked(work, args, folder / "log", strict_limits(), _KEYS["victim"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
