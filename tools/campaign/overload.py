"""Ten times the work that a server can do: ``python -m tools.campaign.overload [--quick]``.

1. As many clients as may run and wait, each asking again once it is answered: the answers a second are the server's
   peak, and a first token after a full queue takes as long as here.
2. Ten times as many requests a second for five minutes, whether earlier ones are answered or not: who is refused hears
   429 with `Retry-After` within 100 ms; who is not has its first token within twice the time of phase 1; answers a
   second stay above 0.9 of the peak. Times are 99th percentiles.
3. Five seconds after the last of these a first token takes as long as on the server at rest, at most twice.

Steps take a time but no processor, as on a GPU: what is measured is the server, and not what the clients leave of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.campaign.liveness import CHAT, ranked_ms, request
from tools.campaign.running import Figures, Target, attacked, options, simulated, strict_limits, verdict

_SEATS = 32  # --max-num-seqs, and --max-waiting-requests
_STEP = 0.02  # seconds
_TIMES = 10.0  # the peak
_REFUSED_MS = 100.0
_PATIENCE = 60.0  # seconds for one answer
_RECOVERS = 5.0  # seconds
_AGAIN = 0.1  # seconds after a refusal
_AT_REST = 20  # requests, one after the other
_BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64, "ignore_eos": True, "stream": True}
_MESSAGE = request(CHAT, json.dumps(_BODY).encode())


@dataclass(frozen=True)
class Answered:
    """An answered stream. `first` and `last` are seconds from the connection to the first and the last bytes that are
    more than a head.
    """

    status: int  # 0 without an answer
    first: float = 0.0
    last: float = 0.0
    retry_after: bool = False


async def ask(port: int) -> Answered:
    """Send one stream, and read it to its end."""
    began = time.perf_counter()
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(_PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(_MESSAGE)
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(1)
                first = time.perf_counter() - began
                while await reader.read(1 << 16):
                    pass
            finally:
                writer.close()
        return Answered(int(head[9:12]), first, time.perf_counter() - began, b"\r\nretry-after: " in head.lower())
    return Answered(0)


async def at_rest(port: int) -> float:
    """Return the longest time to a first token, in seconds, of requests that are alone."""
    return max([(await ask(port)).first for _ in range(_AT_REST)])


async def closed(port: int, seconds: float) -> list[Answered]:
    """Return the answers to as many clients as have room, each of which asks again."""
    end, found = time.perf_counter() + seconds, list[Answered]()

    async def client() -> None:
        while time.perf_counter() < end:
            found.append(await ask(port))

    await asyncio.gather(*[client() for _ in range(2 * _SEATS)])
    return found


async def offer(port: int, rate: float, seconds: float) -> list[asyncio.Task[Answered]]:
    """Begin `rate` requests a second."""
    began, tasks = time.perf_counter(), list[asyncio.Task[Answered]]()
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(port)))
    return tasks


async def recovery(port: int, bound: float) -> float:
    """Return the seconds until a first token takes at most `bound` seconds; infinite when that is too late."""
    began = time.perf_counter()
    while (now := time.perf_counter()) < began + _RECOVERS:
        answer = await ask(port)
        await asyncio.sleep(_AGAIN)
        if answer.status == 200 and answer.first <= bound:
            return now + answer.first - began
    return float("inf")


def _high_ms(seconds: Sequence[float]) -> float:
    return ranked_ms(seconds)[1]


async def run(target: Target, seconds: float) -> Figures:
    port = target.port
    rest = await at_rest(port)
    began = time.perf_counter()
    full = [answer for answer in await closed(port, min(seconds, 30.0)) if answer.status == 200]
    peak, queued = len(full) / (time.perf_counter() - began), _high_ms([answer.first for answer in full])
    began = time.perf_counter()
    tasks = await offer(port, _TIMES * peak, seconds)
    recovered = await recovery(port, 2 * rest)
    answers = await asyncio.gather(*tasks)
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 429]
    rate, first = len(served) / (time.perf_counter() - began), _high_ms([answer.first for answer in served])
    soon = _high_ms([answer.last for answer in refused])
    others = {answer.status for answer in answers} - {200, 429}
    problems = {
        f"answers with status {sorted(others)}": bool(others),
        f"429 p99 {soon:.0f} ms, more than {_REFUSED_MS:g}": soon > _REFUSED_MS,
        "429 without Retry-After": not all(answer.retry_after for answer in refused),
        f"first token p99 {first:.0f} ms, more than twice {queued:.0f}": first > 2 * queued,
        f"{rate:.1f} answers/s, less than 0.9 of {peak:.1f}": rate < 0.9 * peak,
        f"first tokens are slower than {2e3 * rest:.0f} ms for more than {_RECOVERS:g} s": recovered > _RECOVERS,
    }
    figures = (
        f"{len(answers)} requests in {seconds:.0f} s, {len(served)} answered, {rate:.1f}/s of {peak:.1f}; "
        f"first token p99 {first:.0f} ms of {queued:.0f}; 429 p99 {soon:.0f} ms; as at rest after {recovered:.1f} s"
    )
    return figures, [problem for problem, found in problems.items() if found]


def main(argv: Sequence[str]) -> int:
    seconds = 30.0 if options("overload", __doc__, argv) else 300.0
    room = ("--max-num-seqs", str(_SEATS), "--max-waiting-requests", str(_SEATS))
    with tempfile.TemporaryDirectory(prefix="overload-") as folder:
        args = [*room, *simulated(_STEP)]
        return verdict(*attacked(partial(run, seconds=seconds), args, Path(folder) / "log", strict_limits()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
