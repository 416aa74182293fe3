"""What an open page at `/ui` costs the engine: processor seconds for each token, with and without one, in turns.

    python -m tools.benchmarks.live --rounds 12 --streams 32

The embedded model serves streams that never end. In every other window somebody asks for the picture of the engine once
a second, as the page does. The engine's processor time is counted, and not the clock's, so that other work on the
machine matters little; the cost is the median over neighbouring windows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ferrule_testkit import server as servers

_BODY = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="pairs of windows")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a window")
    parser.add_argument("--streams", type=int, default=32)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--max-num-seqs", str(given.streams), "--no-enable-prefix-caching"]
        around = {"FERRULE_CPU_KVCACHE_SPACE": "1"}
        with servers.running(arguments, Path(folder) / "log", around) as server, _load(server.url, given.streams):
            _measure(server, given.rounds, given.seconds)


def _measure(server: servers.Server, rounds: int, seconds: float) -> None:
    costs = []
    for number in range(rounds):
        pair = {}
        for asks in (False, True) if number % 2 else (True, False):
            pair[asks] = _window(server, seconds, asks)
        costs.append(pair[True] / pair[False] - 1)
        print(
            f"{pair[False] * 1e6:8.2f} µs for a token, {pair[True] * 1e6:8.2f} with a page: {costs[-1]:+.2%}",
            flush=True,
        )
    quarter, middle, three = statistics.quantiles(costs, n=4)
    print(f"an open page costs {middle:+.2%} (half of the pairs: {quarter:+.2%} to {three:+.2%})")


def _window(server: servers.Server, seconds: float, asks: bool) -> float:
    """Return the engine's processor seconds for each token that it generated meanwhile."""
    engine = server.children()["engine"]
    before = _processor_seconds(engine), _tokens(server.url)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if asks:
            urllib.request.urlopen(f"{server.url}/ui/api/live", timeout=60).read()
        time.sleep(1)
    after = _processor_seconds(engine), _tokens(server.url)
    return (after[0] - before[0]) / (after[1] - before[1])


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _tokens(url: str) -> float:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:generation_tokens_total"))


@contextmanager
def _load(url: str, streams: int) -> Iterator[None]:
    """Keep so many streams busy: each asks again when its answer ends."""
    stopped = threading.Event()

    def talk() -> None:
        data = json.dumps(_BODY).encode()
        while not stopped.is_set():
            request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
            urllib.request.urlopen(request, timeout=600).read()

    for _ in range(streams):
        threading.Thread(target=talk, daemon=True).start()
    time.sleep(5)  # until all run
    try:
        yield
    finally:
        stopped.set()


if __name__ == "__main__":
    main()
