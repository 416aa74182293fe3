"""What the host costs, without a model: the engine's part of a step, and the API process's part of a token.

    python -m tools.benchmarks.simulate                  # 1,024 running and 10,000 waiting requests, and fewer
    python -m tools.benchmarks.simulate --frontend       # from the engine's message to the bytes of an event
    python -m tools.benchmarks.simulate --long 100000    # while a prompt of that many tokens is admitted
    … --profile                                               # where the time goes

Figures for people; no test depends on them. `docs/benchmarks/scaling.md` has some.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from ferrule.api.app import build_app
from ferrule.api.lifecycle import Lifecycle
from ferrule.assembly.engine import Engine, build_engine, open_executor
from ferrule.client.demux import DemuxClient
from ferrule.config import CacheConfig, Config, FrontendConfig, LoadConfig, ModelConfig, Resolved, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.frontend.service import FrontendService, build_service
from ferrule.interfaces.executor import Step
from ferrule.plugin import Plugins, discover
from ferrule.types import (
    EngineRequest,
    FinishReason,
    RequestDelta,
    RequestTimes,
    StepPlan,
    TokenSampling,
)
from ferrule.wire.messages import Deltas, FromEngine, Ready, Submit, ToEngine
from ferrule_contrib import tiny

PROMPT = 32  # tokens
STEPS = 400
CLIENT = b"api-1"


def configured(running: int, **sections: Any) -> Resolved:
    """Return a configuration with the embedded model's shape and tokenizer, on the simulated executor."""
    config = Config(
        model=ModelConfig(
            model=str(tiny.path()),
            served_model_name=("tiny",),
            max_model_len=131_072,
            hf_overrides={"max_position_embeddings": 131_072},
        ),
        cache=CacheConfig(num_gpu_blocks_override=200_000),
        scheduler=SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=max(8192, running), pipeline_depth=1),
        frontend=FrontendConfig(disable_log_requests=True, disable_uvicorn_access_log=True),
        load=LoadConfig(),
    )
    config = replace(config, parallel=replace(config.parallel, distributed_executor_backend="simulated"))
    return resolve(replace(config, **sections))


# ------------------------------------------------------------------------------------------------ the engine


class Wire:
    """The engine's socket, without the socket: messages are encoded and decoded as they are on the real one."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._inbox: list[bytes] = []
        self.sent = 0  # bytes

    def post(self, message: ToEngine) -> None:
        self._inbox.append(self._encoder.encode(message))

    def receive(self, timeout: float) -> list[tuple[bytes, ToEngine]]:
        arrived, self._inbox = self._inbox, []
        return [(CLIENT, self._decoder.decode(frame)) for frame in arrived]

    def send(self, client: bytes, message: FromEngine) -> None:
        self.sent += len(self._encoder.encode(message))


def request(number: int, prompt: int, max_tokens: int) -> EngineRequest:
    sampling = TokenSampling(seed=number, max_tokens=max_tokens, stop_token_ids=(0,), min_tokens=max_tokens)
    ids = (number % 2000 + 5, *(position % 2000 + 5 for position in range(1, prompt)))
    return EngineRequest(id=f"{number:032x}", prompt_ids=ids, work=sampling, arrival=number * 1e-3)


def crowded(running: int, waiting: int, policy: str, plugins: Plugins) -> tuple[Engine, Wire]:
    """Return an engine with this many requests, the running ones past their prompts."""
    config = configured(running)
    wire = Wire()
    config = replace(config, scheduler=replace(config.scheduler, scheduling_policy=policy))
    engine = build_engine(config, plugins, wire, open_executor(config, plugins), cache_root=b"root")
    for number in range(running + waiting):
        wire.post(Submit(request(number, PROMPT, 20_000)))
    while engine.loop.scheduler.stats().generation_tokens < running:
        engine.loop.step()
    return engine, wire


def bench_engine(running: int, waiting: int, policy: str, plugins: Plugins, steps: int = STEPS) -> str:
    """Time steps of the loop: messages, schedule, commit, deltas encoded; not what the executor does in them."""
    engine, _ = crowded(running, waiting, policy, plugins)
    seconds = timed(engine, steps)
    figures = engine.loop.scheduler.stats()
    return f"{policy:8} {figures.running:5} running {figures.waiting:6} waiting  {spread(seconds)}"


def bench_long(tokens: int, plugins: Plugins, steps: int = STEPS) -> str:
    """Time steps of 256 running requests while one long prompt arrives and is computed in pieces."""
    engine, wire = crowded(256, 0, "fcfs", plugins)
    before = timed(engine, steps)
    wire.post(Submit(request(10**6, tokens, 16)))
    engine.loop.scheduler.cancel([f"{0:032x}"], FinishReason.ABORT, 0.0)  # a slot for it
    during = timed(engine, -(-tokens // 8192) + 4)
    return f"before   {spread(before)}\nduring   {spread(during)}"


def timed(engine: Engine, count: int) -> list[float]:
    """Return the CPU seconds of each step, sorted, without the executor's: its time is the device's."""
    seconds, devices = [], []
    submit = engine.executor.submit

    def submitted(plan: StepPlan) -> Step:
        first = time.thread_time()
        try:
            return submit(plan)
        finally:
            devices.append(time.thread_time() - first)

    with mock.patch.object(engine.executor, "submit", submitted):
        for _ in range(count):
            devices.clear()
            first = time.thread_time()
            engine.loop.step()
            seconds.append(time.thread_time() - first - sum(devices))
    return sorted(seconds)


def spread(seconds: Sequence[float]) -> str:
    middle, high, most = seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)], seconds[-1]
    return f"{middle * 1e3:7.3f} ms a step (p99 {high * 1e3:.3f}, most {most * 1e3:.3f})"


# ------------------------------------------------------------------------------------------------ the API process


class Tap(DemuxClient):
    """An engine client whose engine gives every open request a token, each time that `turn` is called."""

    def __init__(self, ready: Ready) -> None:
        super().__init__()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._open: dict[str, tuple[EngineRequest, int]] = {}
        self._dispatch(ready)

    def _post(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._open[message.request.id] = (message.request, 0)

    def turn(self) -> None:
        deltas = []
        for id, (one, count) in list(self._open.items()):
            last = count + 1 == one.work.max_tokens
            ids = ((len(id) + count * 7919) % 2000 + 5,)
            finish, times = (FinishReason.LENGTH, RequestTimes()) if last else (None, None)
            deltas.append(RequestDelta(id=id, token_ids=ids, finish=finish, times=times))
            self._open[id] = (one, count + 1)
            if last:
                del self._open[id]
        self._dispatch(self._decoder.decode(self._encoder.encode(Deltas(tuple(deltas)))))

    @property
    def busy(self) -> bool:
        return bool(self._open)

    async def close(self) -> None:
        self.die("closed")


async def bench_frontend(streams: int, tokens: int, path: str, plugins: Plugins) -> str:
    """Stream `tokens` to each of `streams` ASGI calls, and divide the processor's time by all tokens."""
    config = configured(streams)
    wire = Wire()
    engine = build_engine(config, plugins, wire, open_executor(config, plugins), cache_root=b"root")
    client = Tap(Ready(engine.info, engine.num_blocks))
    service = build_service(config, plugins, client, Path(config.model.model))
    lifecycle = Lifecycle()
    app = build_app(config, plugins, lifecycle)
    lifecycle.ready(service)
    sent: list[int] = []
    body: dict[str, Any] = {"stream": True, "max_tokens": tokens, "ignore_eos": True}
    body |= {"prompt": [5, 6, 7]} if path == "completions" else {"messages": [{"role": "user", "content": "2+3"}]}
    calls = [asyncio.create_task(_call(app, path, body, sent)) for _ in range(streams)]
    await _admitted(service, calls, streams)
    began, turns = time.process_time(), 0
    while client.busy:
        client.turn()
        turns += 1
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*calls)
    spent = time.process_time() - began
    await service.close()
    count = streams * tokens
    return f"{path:16} {streams:5} streams  {spent / count * 1e6:6.1f} µs a token, {len(sent)} writes, {turns} turns"


def _run_frontend(streams: int, path: str, plugins: Plugins) -> str:
    return asyncio.run(bench_frontend(streams, 100, path, plugins))


async def _admitted(service: FrontendService, calls: Sequence[asyncio.Task[None]], streams: int) -> None:
    client: Any = service._client
    while len(client._open) < streams:
        if done := [call for call in calls if call.done()]:
            done[0].result()
            raise RuntimeError("a call ended before it was streamed")
        await asyncio.sleep(0.001)


async def _call(app: Callable[..., Any], path: str, body: dict[str, Any], sent: list[int]) -> None:
    """Run one ASGI exchange, up to its last byte."""
    data, done = json.dumps(body).encode(), asyncio.Event()
    arrives = iter([{"type": "http.request", "body": data, "more_body": False}])

    async def receive() -> dict[str, Any]:
        message = next(arrives, None)
        if message is None:
            await done.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise RuntimeError(f"answered {message['status']}")
        if message["type"] == "http.response.body":
            sent.append(len(message["body"]))

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    target = "/v1/completions" if path == "completions" else "/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": target, "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    done.set()


# ------------------------------------------------------------------------------------------------ the command


@contextmanager
def profiled(wanted: bool) -> Iterator[None]:
    profile = cProfile.Profile()
    if wanted:
        profile.enable()
    try:
        yield
    finally:
        if wanted:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.simulate", description=__doc__)
    parser.add_argument("--running", type=int, help="requests that decode; default: 256, 512 and 1,024")
    parser.add_argument("--waiting", type=int, help="requests in the queue; default: none and 10,000")
    parser.add_argument("--policy", default="fcfs", help="policy plugin")
    parser.add_argument("--frontend", action="store_true", help="the API process instead of the engine")
    parser.add_argument("--long", type=int, metavar="TOKENS", help="while a long prompt is admitted")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args(argv)
    plugins = discover()
    runs: list[Callable[[], str]] = []
    if args.long:
        runs.append(partial(bench_long, args.long, plugins))
    elif args.frontend:
        for streams in (args.running,) if args.running else (64, 256, 1024):
            for path in ("completions", "chat"):
                runs.append(partial(_run_frontend, streams, path, plugins))
    else:
        for running in (args.running,) if args.running else (256, 512, 1024):
            for waiting in (0, 10_000) if args.waiting is None else (args.waiting,):
                runs.append(partial(bench_engine, running, waiting, args.policy, plugins))
    for run in runs:
        with profiled(args.profile):
            print(run(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
