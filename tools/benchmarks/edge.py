"""What the HTTP edge costs in two checkouts: `python -m tools.benchmarks.edge OLD_PYTHON NEW_PYTHON [--only chat]`.

Each argument is the Python of an environment with one checkout installed. Both serve the embedded model on loopback,
and each measurement alternates between them, so that a busy machine is busy for both. Shown are medians of rounds:

- start: seconds to ``/health`` 200, and the resident memory of the API process when it is ready;
- chat: p50 and p99 of a chat of one token at 1 and 64 clients, and processor time of the API process for each;
- bodies: how long large and wrong bodies take to be refused.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

_HEALTHY_SECONDS = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Server:
    """A server of one checkout (`ferrule serve`). `api` is its API process."""

    python: str
    port: int
    process: subprocess.Popen[bytes]
    seconds: float  # until it was healthy

    @property
    def api(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"\0api" in Path(f"/proc/{pid}/cmdline").read_bytes())

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the API process so far."""
        fields = Path(f"/proc/{self.api}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @property
    def rss_mib(self) -> float:
        line = next(line for line in Path(f"/proc/{self.api}/status").read_text().splitlines() if "VmRSS" in line)
        return int(line.split()[1]) / 1024


@contextlib.contextmanager
def serving(python: str, *args: str) -> Iterator[Server]:
    """Run a healthy server with these options for the length of a block. Raises SystemExit when it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [python, "-m", "ferrule", "serve", "--host", "127.0.0.1", "--port", str(port), *args]
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--disable-uvicorn-access-log"], stdout=-3, stderr=-3)
    try:
        while not _healthy(port):
            if process.poll() is not None or time.perf_counter() - start > _HEALTHY_SECONDS:
                raise SystemExit(f"{python}: the server did not start")
            time.sleep(0.01)
        yield Server(python, port, process, time.perf_counter() - start)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


# ------------------------------------------------------------------------------------------------ requests


def request_bytes(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@dataclass
class _Connection:
    """One keep-alive connection with one request at a time."""

    socket: socket.socket
    began: float = 0.0
    answer: bytearray = field(default_factory=bytearray)

    def send(self, request: bytes) -> None:
        self.answer.clear()
        self.began = time.perf_counter()
        self.socket.sendall(request)

    def complete(self) -> bool:
        """Read once; whether the answer is whole."""
        self.answer += self.socket.recv(1 << 16)
        head, found, body = bytes(self.answer).partition(b"\r\n\r\n")
        return bool(found) and len(body) >= int(head.lower().partition(b"content-length:")[2].split(b"\r", 1)[0])


def drive(port: int, request: bytes, clients: int, count: int) -> tuple[list[float], int]:
    """Return the seconds of each of `count` requests that `clients` connections send one after the other, and the last
    status.
    """
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for _ in range(clients):
            opened = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(opened, selectors.EVENT_READ, _Connection(opened))
        connections: list[_Connection] = [key.data for key in selector.get_map().values()]
        for connection in connections:
            connection.send(request)
        seconds: list[float] = []
        status = 0
        while len(seconds) < count:
            for key, _ in selector.select():
                connection = key.data
                if connection.complete():
                    seconds.append(time.perf_counter() - connection.began)
                    status = int(connection.answer.split(b" ", 2)[1])
                    connection.send(request)
        return seconds[:count], status


# ------------------------------------------------------------------------------------------------ measurements


def chat(server: Server, clients: int, count: int) -> dict[str, float]:
    """Measure a chat of one token: p50 and p99 in ms, and µs of the API process's CPU time."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}).encode()
    used = server.cpu_seconds
    seconds, status = drive(server.port, request_bytes(CHAT, body), clients, count)
    if status != 200:
        raise SystemExit(f"{server.python}: a chat was answered with status {status}")
    cpu = (server.cpu_seconds - used) / count
    ranked = sorted(seconds)
    return {
        "p50 ms": 1e3 * ranked[len(ranked) // 2],
        "p99 ms": 1e3 * ranked[len(ranked) * 99 // 100],
        "API µs": 1e6 * cpu,
    }


def bodies() -> Mapping[str, tuple[str, dict[str, Any]]]:
    """Return paths and bodies by name. The server refuses each of them with status 400."""
    turn: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    prompt: dict[str, Any] = {"prompt": "Hello", "max_tokens": 1}
    nested: Any = "x"
    for _ in range(50):
        nested = [{"type": "text", "text": nested}]
    return {
        "500,000 token ids": (COMPLETIONS, {"prompt": [7] * 500_000, "max_tokens": 1}),
        "400,000 wrong token ids": (COMPLETIONS, {"prompt": [7] + ["x"] * 400_000, "max_tokens": 1}),
        "logit_bias, 200,000 wrong values": (CHAT, turn | {"logit_bias": {str(n): "x" for n in range(200_000)}}),
        "logit_bias, 200,000 wrong keys": (CHAT, turn | {"logit_bias": {f"x{n}": 1 for n in range(200_000)}}),
        "100,000 wrong messages": (CHAT, turn | {"messages": [{"role": 1}] * 100_000}),
        "100,000 wrong parts": (CHAT, turn | {"messages": [{"role": "user", "content": [{"type": 1}] * 100_000}]}),
        "100,000 wrong tools": (CHAT, turn | {"tools": [{"type": "x"}] * 100_000}),
        "100,000 wrong prompts": (COMPLETIONS, prompt | {"prompt": ["x"] + [1] * 100_000}),
        "100,000 wrong processors": (COMPLETIONS, prompt | {"logits_processors": [{"qualname": 1}] * 100_000}),
        "10,000 unknown fields, one wrong": (CHAT, turn | {f"field{n}": n for n in range(10_000)} | {"n": "x"}),
        "names like __class__": (CHAT, turn | {"__class__": {}, "__init__": 1, "model_fields": [], "n": "x"}),
        "unions, 50 deep": (CHAT, turn | {"messages": [{"role": "user", "content": nested}]}),
        "a number of 4,000 digits": (CHAT, turn | {"seed": 10**4000}),
    }


def refusal(server: Server, path: str, body: bytes) -> dict[str, float]:
    """Return the milliseconds until a body is refused, and those of the API process's CPU time."""
    count, used = 5, server.cpu_seconds
    seconds, status = drive(server.port, request_bytes(path, body), 1, count)
    if status != 400:
        raise SystemExit(f"{server.python}: {body[:80]!r}… was answered with status {status}")
    return {"median ms": 1e3 * median(seconds), "API ms": 1e3 * (server.cpu_seconds - used) / count}


Measure = Callable[[Server], dict[str, float]]


def in_turns(servers: Sequence[Server], measure: Measure, rounds: int) -> list[dict[str, float]]:
    """Measure the servers in turns; return the medians of each server's rounds."""
    found: list[list[dict[str, float]]] = [[] for _ in servers]
    for number in range(rounds):
        order = range(len(servers)) if number % 2 else reversed(range(len(servers)))
        for index in order:
            found[index].append(measure(servers[index]))
    return [{name: median(row[name] for row in rows) for name in rows[0]} for rows in found]


def show(name: str, rows: Sequence[Mapping[str, float]]) -> None:
    """Print a line for each figure: every server's value, and the ratio of the last one's to the first one's."""
    for figure in rows[0]:
        values = [row[figure] for row in rows]
        text = "  ".join(f"{value:9.2f}" for value in values)
        print(f"{name:36} {figure:10} {text}   x {values[-1] / max(values[0], 1e-9):.2f}", flush=True)


def starts(pythons: Sequence[str], rounds: int) -> list[dict[str, float]]:
    """Measure, for each checkout, one after the other in each round, the seconds of a start and the memory of the API
    process.
    """
    found: list[list[dict[str, float]]] = [[] for _ in pythons]
    for _ in range(rounds):
        for index, python in enumerate(pythons):
            with serving(python) as server:
                found[index].append({"health s": server.seconds, "API MiB": server.rss_mib})
    return [{name: median(row[name] for row in rows) for name in rows[0]} for rows in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="of an environment with a checkout, oldest first")
    parser.add_argument("--only", choices=("start", "chat", "bodies"), help="measure this part only")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    wanted = {options.only} if options.only else {"start", "chat", "bodies"}
    if "start" in wanted:
        show("start", starts(options.pythons, options.rounds))
    if wanted == {"start"}:
        return
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(python)) for python in options.pythons]
        in_turns(servers, lambda server: chat(server, 1, 100), 2)  # to warm up
        for clients, count in ((1, 400), (64, 3200)) if "chat" in wanted else ():
            measure = lambda server, clients=clients, count=count: chat(server, clients, count)  # noqa: E731
            show(f"one-token chat, {clients} clients", in_turns(servers, measure, options.rounds))
        for name, (path, content) in bodies().items() if "bodies" in wanted else ():
            body = json.dumps(content).encode()
            show(name, in_turns(servers, lambda server, p=path, b=body: refusal(server, p, b), 2))  # type: ignore[misc]


if __name__ == "__main__":
    main()
