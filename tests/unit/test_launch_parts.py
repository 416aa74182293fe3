"""The pieces of launching that need no process: streams of deltas, the socket's codec, folders, figures."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import msgspec
import pytest
import zmq

from ferrule.config import Config
from ferrule.errors import ConfigError, EngineDead, RequestFailed, StartupError
from ferrule.execution.wire import EngineSocket
from ferrule.frontend.client_demux import DemuxClient
from ferrule.frontend.client_process import ProcessClient
from ferrule.launch.listen import base_url, bind
from ferrule.launch.process import Boot
from ferrule.launch.supervisor import private_dir
from ferrule.plugin import PluginSet
from ferrule.types import (
    CacheGroup,
    Call,
    CallReply,
    Cancel,
    Deltas,
    EngineRequest,
    EngineStats,
    FinishReason,
    ModelInfo,
    Ready,
    RequestDelta,
    Submit,
    ToEngine,
    TokenSampling,
)
from ferrule_plugins.command.bench.figures import percentile, random_prompts
from ferrule_plugins.command.bench.load import Record, figures_of

INFO = ModelInfo(
    architecture="A",
    implementation="test",
    vocab_size=8,
    max_model_len=16,
    dtype="float32",
    device="cpu",
    attention="none",
    groups=(CacheGroup("full", 4),),
    page_bytes=1,
    max_blocks=9,
)


class Recorder(DemuxClient):
    """A client whose messages go to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[ToEngine] = []

    def _post(self, message: ToEngine) -> None:
        self.sent.append(message)

    def deliver(self, *deltas: RequestDelta) -> None:
        self._dispatch(Deltas(deltas, EngineStats(steps=1)))

    def answer(self, reply: CallReply) -> None:
        self._dispatch(reply)

    async def close(self) -> None:
        self.die("closed")


def request(name: str) -> EngineRequest:
    return EngineRequest(id=name, prompt_ids=(1, 2), sampling=TokenSampling(seed=0, max_tokens=4))


async def test_stream_is_submitted_at_once_and_ends_with_its_terminal_delta() -> None:
    client = Recorder()
    stream = client.generate(request("a"))
    assert client.sent == [Submit(request("a"))]
    client.deliver(RequestDelta("a", (1,)), RequestDelta("b", (9,)))
    client.deliver(RequestDelta("a", (2,), finish=FinishReason.STOP))
    client.deliver(RequestDelta("a", (3,)))
    assert [d.token_ids async for d in stream] == [(1,), (2,)]
    assert client.stats().steps == 1
    await stream.aclose()
    assert len(client.sent) == 1


async def test_closing_early_cancels_once_and_drops_what_comes() -> None:
    client = Recorder()
    stream = client.generate(request("a"))
    client.deliver(RequestDelta("a", (1,)))
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert client.sent[1:] == [Cancel(("a",))]
    client.deliver(RequestDelta("a", (2,)))
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_death_ends_streams_and_calls_and_keeps_the_first_cause() -> None:
    client = Recorder()
    stream = client.generate(request("a"))
    call = asyncio.create_task(client.call("x"))
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    client.die("first")
    client.die("second")
    for waiting in (call, reader):
        with pytest.raises(EngineDead, match="first"):
            await waiting
    with pytest.raises(EngineDead):
        client.generate(request("b"))
    assert client.health().state == "dead"


async def test_calls_are_answered_by_number() -> None:
    client = Recorder()
    good, bad = asyncio.create_task(client.call("x", 1)), asyncio.create_task(client.call("y"))
    await asyncio.sleep(0)
    numbers = {m.name: m.number for m in client.sent if isinstance(m, Call)}
    client.answer(CallReply(numbers["y"], error="no"))
    client.answer(CallReply(numbers["x"], result=[1]))
    assert await good == [1]
    with pytest.raises(RequestFailed, match="no"):
        await bad


async def test_client_and_engine_socket_talk_over_a_private_socket(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    engine = EngineSocket(path)
    read, write = os.pipe()
    client = ProcessClient(path, read)
    assert path.stat().st_mode & 0o077 == 0
    await asyncio.to_thread(engine.receive, 0.3)  # hello comes before the model is there, and is not answered
    assert client.health().state == "starting"
    engine.ready = Ready(INFO, 9)
    serving = asyncio.create_task(asyncio.to_thread(_serve_one, engine))
    await asyncio.wait_for(client.wait_ready(), 10)
    assert client.info == INFO
    deltas = [d async for d in client.generate(request("a"))]
    assert [d.token_ids for d in deltas] == [(7,), (8,)]
    await serving
    os.close(write)  # the engine's end
    for _ in range(100):
        if client.health().state == "dead":
            break
        await asyncio.sleep(0.02)
    assert client.health().state == "dead"
    await client.close()
    engine.close()
    assert not path.exists()


def _serve_one(engine: EngineSocket) -> None:
    for _ in range(200):
        for peer, message in engine.receive(0.1):
            assert isinstance(message, Submit)
            engine.send(peer, Deltas((RequestDelta(message.request.id, (7,)),)))
            engine.send(peer, Deltas((RequestDelta(message.request.id, (8,), finish=FinishReason.LENGTH),)))
            return
    raise TimeoutError


def test_foreign_frames_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    engine = EngineSocket(path)
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(f"ipc://{path}")
    for frame in (b"", b"\x80\x04\x95.", b"{}", os.urandom(64), msgspec.msgpack.encode({"type": "Exec", "code": "1"})):
        peer.send(frame)
    peer.send(msgspec.msgpack.encode(Cancel(("a",))))
    messages: list[ToEngine] = []
    for _ in range(50):
        messages += [message for _, message in engine.receive(0.1)]
        if messages:
            break
    assert messages == [Cancel(("a",))]
    peer.close(0)
    context.term()
    engine.close()


def test_boot_message_survives_the_pipe() -> None:
    boot = Boot(name="x-0", config=Config(), plugins=PluginSet(), socket_path="/x", listen_fd=3, alive_fd=4)
    assert msgspec.json.decode(msgspec.json.encode(boot), type=Boot) == boot


def test_bind_says_that_a_port_is_taken() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert base_url(taken, Config()) == f"http://127.0.0.1:{port}"
        with pytest.raises(StartupError, match=f"port {port}"):
            bind("127.0.0.1", port)
    with bind(None, 0) as everywhere:
        assert base_url(everywhere, Config()).startswith("http://127.0.0.1:")
    with pytest.raises(StartupError, match="the name is not known"):
        bind("no.such.host.invalid", 0)
    socket.create_server(("127.0.0.1", port)).close()  # and gives it back


def test_private_dir_removes_what_the_dead_left(tmp_path: Path) -> None:
    stale = tmp_path / "ferrule-999999999-abc"
    mine = tmp_path / f"ferrule-{os.getpid()}-abc"
    foreign = tmp_path / "ferrule-notes-x"
    for folder in (stale, mine, foreign):
        folder.mkdir()
    made = private_dir(str(tmp_path))
    assert made.stat().st_mode & 0o777 == 0o700
    assert not stale.exists()
    assert mine.exists()
    assert foreign.exists()
    with pytest.raises(ConfigError, match="FERRULE_RPC_BASE_PATH"):
        private_dir(str(tmp_path / "missing"))


def test_percentiles_and_prompts() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([], 99) == 0.0
    prompts = random_prompts(3, 8, 5, (10, 20), 1)
    assert prompts == random_prompts(3, 8, 5, (10, 20), 1)
    assert {tuple(p[:5]) for p in prompts} == {tuple(prompts[0][:5])}
    assert len({tuple(p) for p in prompts}) == 3


def test_bench_figures_count_only_what_completed() -> None:
    good = Record(start=0.0, chunks=[1.0, 1.5, 2.5], prompt_tokens=4, output_tokens=3, end=2.6)
    bad = Record(start=0.0, error="HTTP 500: x", end=0.1)
    figures = figures_of([good, bad], 2.0)
    assert (figures["completed"], figures["failed"]) == (1, 1)
    assert figures["output_throughput"] == 1.5
    assert figures["p50_ttft_ms"] == 1000.0
    assert figures["p50_itl_ms"] == 750.0
    assert figures["p50_tpot_ms"] == 750.0
    assert figures["errors"] == ["HTTP 500: x"]
