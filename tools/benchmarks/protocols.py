"""What a streamed token costs in each protocol: `python -m tools.benchmarks.protocols [PATH …]`.

One server makes its tokens up, so that nearly all of its API process's work is the stream's. Streams of one protocol
run side by side, and protocols take turns. Shown are medians of rounds: µs of the API process's processor time for
each token, and what that is beside chat completions.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from ferrule_testkit.server import WITHOUT_MODEL
from tools.benchmarks.edge import CHAT, Server, serving

_TOKENS = 400
_STREAMS = 8
_COUNT = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count|generated_tokens)":(\d+)')
_TALK = {"model": "ferrule-tiny", "messages": [{"role": "user", "content": "Hello"}]}
_GENERATE = {"inputs": "Hello", "parameters": {"max_new_tokens": _TOKENS, "details": True}}
BODIES: Mapping[str, Mapping[str, Any]] = {
    CHAT: _TALK | {"max_tokens": _TOKENS, "stream": True, "stream_options": {"include_usage": True}},
    "/v1/messages": _TALK | {"max_tokens": _TOKENS, "stream": True},
    "/api/chat": _TALK | {"options": {"num_predict": _TOKENS}},
    "/generate_stream": _GENERATE,
}


def stream(port: int, path: str) -> int:
    """Read one stream, and return how many tokens it tells of. Raises SystemExit for another answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, json.dumps(BODIES[path]), {"content-type": "application/json"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{path}: {answer.status} {body.decode()}")
    return int(_COUNT.findall(body)[-1])


def measure(server: Server, path: str) -> float:
    """Return the µs of the API process for each token of streams."""
    used = server.cpu_seconds
    with ThreadPoolExecutor(_STREAMS) as pool:
        tokens = sum(pool.map(lambda _: stream(server.port, path), range(_STREAMS)))
    return (server.cpu_seconds - used) * 1e6 / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", default=list(BODIES))
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    paths = [CHAT, *(path for path in asked.paths if path != CHAT)]
    found: dict[str, list[float]] = {path: [] for path in paths}
    with serving(sys.executable, *WITHOUT_MODEL, "--routers", "+tgi") as server:
        for _ in range(asked.rounds + 1):
            for path in paths:
                found[path].append(measure(server, path))
    costs = {path: median(values[1:]) for path, values in found.items()}  # the first round warms up
    for path, cost in costs.items():
        print(f"{path:24} {cost:7.1f} µs a token, {cost / costs[CHAT]:.2f} of chat completions")


if __name__ == "__main__":
    main()
