"""How long probes take while a server is under load: `python -m tools.campaign.liveness PYTHON … [--load burst]`.

Each argument is the Python of an environment with one checkout installed; without one it is this. Each serves the
embedded model on loopback, one after the other, with the same load. A sampler in a process of its own opens new
connections every 50 ms, whether earlier ones were answered or not, so that a stall counts with its whole length. It
asks `/health` on the main port, and `/health` and `/metrics` on `--probe-port`. It also asks a bare server, a process
that has nothing else to do: what that takes is the machine's, and is taken off where `--check` compares with the
limits. Shown are, for each load, median, 99th percentile and maximum of the probes, and of the answers to
the load by status.

- burst: 2,600 chats at once, on a connection each;
- bodies: ten bodies of 31 MiB of token ids at once;
- prompts: four prompts of 27 MB of text at once;
- overload: for ten seconds, ten times the connections that the queue has room for, each asking again once answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection

from tools.campaign.victim import beside

_EVERY = 0.05  # seconds between two probes
_PATIENCE = 60.0  # seconds; an answer that takes longer counts as this
_HEALTHY = 90.0
MAIN, HEALTH, METRICS = "/health", "probe-port /health", "probe-port /metrics"
LIMITS_MS: Mapping[str, float] = {MAIN: 1000.0, HEALTH: 100.0, METRICS: 500.0}  # of 99 in 100, over a bare server
BARE = "bare /health"
QUEUE = 64  # --max-waiting-requests of the server under overload
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_STALLS = re.compile(r'^ferrule:event_loop_stall_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)$', re.MULTILINE)

Figures = dict[str, list[float]]  # seconds of the answers, by what they are


def request(path: str, body: bytes | None = None) -> bytes:
    """Return the bytes of one request, after which the connection closes."""
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    if body is not None:
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + (body or b"")


async def ask(port: int, message: bytes, context: ssl.SSLContext | None = None) -> tuple[str, float]:
    """Return status and seconds from before the connection to the answer's end; "lost" without an answer."""
    began, status = time.perf_counter(), "lost"
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(_PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            try:
                writer.write(message)
                status = (await reader.read(64))[9:12].decode() or status  # a refusal may come before the body's end
                while await reader.read(1 << 16):
                    pass
            finally:
                writer.close()
    return status, time.perf_counter() - began


async def read(port: int, path: str) -> str:
    """Return the body of a GET."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(path))
    try:
        return (await reader.read()).partition(b"\r\n\r\n")[2].decode()
    finally:
        writer.close()


async def sample(ports: Mapping[str, int], ends: Callable[[], bool]) -> Figures:
    """Ask each probe, whose last word is the path, at its port every 50 ms until `ends` says so."""
    found: Figures = defaultdict(list)

    async def one(name: str, port: int) -> None:
        status, seconds = await ask(port, request(name.split()[-1]))
        found[name if status == "200" else f"{name} {status}"].append(seconds)

    tasks: list[asyncio.Task[None]] = []
    due = time.perf_counter()
    while not ends():
        tasks += [asyncio.create_task(one(name, port)) for name, port in ports.items()]
        due += _EVERY
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    await asyncio.gather(*tasks)
    return found


def _sampler(main: int, probe: int, bare: int, end: Connection) -> None:
    os.setsid()  # it is none of the clients: Linux may share processors among sessions first
    end.send(asyncio.run(sample({MAIN: main, HEALTH: probe, METRICS: probe, BARE: bare}, end.poll)))


def _bare(end: Connection) -> None:
    """Answer every connection at once; the port goes to `end`."""
    os.setsid()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end.send(listener.getsockname()[1])
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 12)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


@contextlib.contextmanager
def sampling(main: int, probe: int) -> Iterator[Figures]:
    """Sample during the block; the figures are there after it."""
    found: Figures = {}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    bare = context.Process(target=_bare, args=(theirs,))
    bare.start()
    process = context.Process(target=_sampler, args=(main, probe, ours.recv(), theirs))
    process.start()
    time.sleep(1.0)  # it imports, and begins with a server at rest
    try:
        yield found
        time.sleep(0.2)
    finally:
        ours.send(None)
        found.update(ours.recv())
        bare.kill()
        for each in (process, bare):
            each.join()


# ------------------------------------------------------------------------------------------------ loads


async def burst(port: int, count: int = 2600) -> Figures:
    """Send `count` chats at once."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}).encode()
    return await _together(port, [request(CHAT, body)] * count)


async def bodies(port: int, count: int = 10) -> Figures:
    """Send `count` bodies of 31 MiB: nearly as many token ids as a body may have."""
    body = b'{"max_tokens":1,"prompt":[' + b",".join([b"1000000"] * 4_060_000) + b"]}"
    return await _together(port, [request(COMPLETIONS, body)] * count)


async def prompts(port: int, count: int = 4) -> Figures:
    """Send `count` prompts of 27 MB."""
    body = json.dumps({"max_tokens": 1, "prompt": "The quick brown fox jumps. " * 1_000_000}).encode()
    return await _together(port, [request(COMPLETIONS, body)] * count)


async def overload(port: int, seconds: float = 10.0, clients: int = 10 * QUEUE) -> Figures:
    """Open `clients` connections that ask again as soon as they are answered."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}).encode()
    found: Figures = defaultdict(list)
    end = time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < end:
            status, took = await ask(port, request(CHAT, body))
            found[status].append(took)

    await asyncio.gather(*[client() for _ in range(clients)])
    return found


async def _together(port: int, messages: Sequence[bytes]) -> Figures:
    found: Figures = defaultdict(list)
    for status, seconds in await asyncio.gather(*[ask(port, message) for message in messages]):
        found[status].append(seconds)
    return found


LOADS: Mapping[str, Callable[[int], Awaitable[Figures]]] = {
    "burst": burst,
    "bodies": bodies,
    "prompts": prompts,
    "overload": overload,
}

# ------------------------------------------------------------------------------------------------ servers


@contextlib.contextmanager
def serving(python: str, *options: str) -> Iterator[tuple[int, int]]:
    """Run a healthy server for the length of a block, and yield its port. Raises SystemExit when it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        port, probe = (each.getsockname()[1] for each in (first, second))
    words = ["serve", "--host", "127.0.0.1", "--port", str(port), "--probe-port", str(probe), *options]
    words.append("--disable-log-requests")
    null = subprocess.DEVNULL
    process = subprocess.Popen([python, "-m", "ferrule", *words], stdout=null, stderr=null, start_new_session=True)
    try:
        end = time.perf_counter() + _HEALTHY
        while asyncio.run(ask(port, request("/health")))[0] != "200":
            if process.poll() is not None or time.perf_counter() > end:
                raise SystemExit(f"{python}: the server did not start")
            time.sleep(0.05)
        asyncio.run(burst(port, 8))  # to warm up
        yield port, probe
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def measure(python: str, load: str) -> tuple[Figures, Figures, str, list[str]]:
    """Return the seconds of the probes, and of the answers to the load, of a new server; its metrics after the load;
    and the problems of a victim beside the load.
    """
    options = ("--max-waiting-requests", str(QUEUE)) if load == "overload" else ()
    with serving(python, *options) as (port, probe):
        with beside(port) as victim, sampling(port, probe) as probes:
            answers = asyncio.run(_awaited(LOADS[load](port)))
        metrics = asyncio.run(read(port, "/metrics"))
    return probes, answers, metrics, victim.seen.problems


def stalls(metrics: str) -> str:
    """Describe how often the server saw its event loop stall for more than 50 ms, and how long at most."""
    counts = {float(le): float(n) for le, n in _STALLS.findall(metrics)}
    late = counts.get(float("inf"), 0.0) - counts.get(0.05, 0.0)
    most = min((le for le, count in counts.items() if count == counts[float("inf")]), default=0.0)
    return f"{late:.0f} loop stalls > 50 ms" + (f", all <= {most:g} s" if late else "")


async def _awaited(work: Awaitable[Figures]) -> Figures:
    return await work


def ranked_ms(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return median, 99th percentile and maximum, in ms; infinite where nothing was answered."""
    ranked = sorted(seconds) or [float("inf")]
    return 1e3 * ranked[len(ranked) // 2], 1e3 * ranked[len(ranked) * 99 // 100], 1e3 * ranked[-1]


def show(title: str, figures: Figures) -> None:
    """Print a line for each kind of answer: how many, and median, 99th percentile and maximum in ms."""
    for name, seconds in sorted(figures.items()):
        median, high, most = ranked_ms(seconds)
        print(f"{title:28} {name:20} {len(seconds):6}   {median:9.1f} {high:9.1f} {most:9.1f}", flush=True)


def problems(probes: Figures) -> list[str]:
    """Return the broken promises of a server: every probe is answered 200, and 99 of 100 for `/health` within the limit
    and the time of a bare server.
    """
    known = (*LIMITS_MS, BARE)
    found = [f"{len(seconds)} probes were answered {name}" for name, seconds in probes.items() if name not in known]
    bare = ranked_ms(probes.get(BARE, [0.0]))[1]
    for name, limit in LIMITS_MS.items():
        high = ranked_ms(probes.get(name, []))[1]
        if high - bare > limit:
            found.append(f"{name} p99 {high:.0f} ms, more than {limit:g} over the {bare:.0f} of a bare server")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="of an environment with a checkout; default: this")
    parser.add_argument("--load", choices=LOADS, help="this load only")
    parser.add_argument("--check", action="store_true", help="fail where a probe takes longer than its limit (p99)")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{'':28} {'answer':20} {'count':>6}   {'p50 ms':>9} {'p99 ms':>9} {'max ms':>9}")
    failures: list[str] = []
    figures: list[str] = []
    for load in [options.load] if options.load else LOADS:
        for number, python in enumerate(options.pythons or [sys.executable]):
            probes, answers, metrics, broken = measure(python, load)
            show(f"{load} [{number}]", probes)
            show(f"{load} [{number}] load", answers)
            failures += broken
            if options.check:
                failures += [f"{load}: {problem}" for problem in problems(probes)]
            said = "p99: " + ", ".join(
                f"{name} {ranked_ms(probes.get(name, []))[1]:.0f} ms" for name in (*LIMITS_MS, BARE)
            )
            if "429" in answers:
                said += f", 429 {ranked_ms(answers['429'])[1]:.0f} ms"
            print(f"{load} [{number}]: {stalls(metrics)}", flush=True)
            figures.append(f"{said}; {stalls(metrics)}")
    print("; ".join(failures) or "; ".join(figures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
