"""The pieces of launching that need no process: streams of deltas, the socket's codec, folders, figures."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from ferrule.client import demux as client_demux
from ferrule.client.demux import DemuxClient
from ferrule.client.process import ProcessClient
from ferrule.config import Config, FrontendConfig
from ferrule.config.resolve import resolve
from ferrule.errors import (
    ConfigError,
    EngineDead,
    ForbiddenError,
    RequestError,
    RequestFailed,
    StartupError,
    UnavailableError,
)
from ferrule.launch import engine_main
from ferrule.launch.listen import base_url
from ferrule.launch.process import Boot, private_dir
from ferrule.launch.resources import as_startup_error
from ferrule.plugin import Plugins
from ferrule.shared_memory import board as board_module
from ferrule.shared_memory.board import BEAT, ENGINE, READY, STALLED, WAITING, Board
from ferrule.types import (
    CacheGroup,
    EngineRequest,
    EngineStats,
    FinishReason,
    ModelInfo,
    RequestDelta,
    TokenLogprobs,
    TokenSampling,
)
from ferrule.wire import lifeline
from ferrule.wire.engine_socket import EngineSocket
from ferrule.wire.messages import Call, CallReply, Cancel, Deltas, Pause, Ready, Submit, ToEngine, Unread
from ferrule_plugins.command.bench.figures import percentile, random_prompts
from ferrule_plugins.command.bench.load import Record, figures_of
from ferrule_plugins.command.listen import bind, listening
from ferrule_testkit.fakes import VirtualClock
from ferrule_testkit.server import own_port

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
    return EngineRequest(id=name, prompt_ids=(1, 2), work=TokenSampling(seed=0, max_tokens=4))


async def test_stream_is_submitted_at_once_and_ends_with_its_terminal_delta() -> None:
    client = Recorder()
    stream = client.generate(request("a"))
    assert client.sent == [Submit(request("a"))]
    client.deliver(RequestDelta(id="a", token_ids=(1,)), RequestDelta(id="b", token_ids=(9,)))
    assert await anext(stream) == RequestDelta(id="a", token_ids=(1,))
    client.deliver(RequestDelta(id="a", token_ids=(2,), finish=FinishReason.STOP))
    client.deliver(RequestDelta(id="a", token_ids=(3,)))
    assert [d.token_ids async for d in stream] == [(2,)]
    assert client.stats().steps == 1
    await stream.aclose()
    assert len(client.sent) == 1


async def test_what_came_since_the_last_look_is_one_delta() -> None:
    """Join, for a reader that lags behind the engine, any number of tokens in one step."""
    client = Recorder()
    stream = client.generate(request("a"))
    entries = [TokenLogprobs(token, -0.5, 1) for token in range(5)]
    client.deliver(
        RequestDelta(id="a", token_ids=(), logprobs=(), prompt_logprobs=(entries[0],)),
        RequestDelta(id="a", token_ids=(1,), logprobs=(entries[1],), prompt_logprobs=(entries[2],), cached=8),
    )
    client.deliver(
        RequestDelta(
            id="a",
            token_ids=(3, 4),
            logprobs=tuple(entries[3:]),
            prompt_logprobs=(),
            finish=FinishReason.STOP,
            stop_reason=4,
            cached=8,
            num_preemptions=2,
        )
    )
    logprobs = (entries[1], *entries[3:])
    assert await anext(stream) == RequestDelta(
        id="a",
        token_ids=(1, 3, 4),
        logprobs=logprobs,
        prompt_logprobs=(entries[0], entries[2]),
        finish=FinishReason.STOP,
        stop_reason=4,
        cached=8,
        num_preemptions=2,
    )
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_patient_reader_gets_the_first_token_and_then_many_at_once() -> None:
    client = Recorder()
    stream = client.generate(request("a"), patient=True)
    client.deliver(RequestDelta(id="a", token_ids=(0,)))
    assert (await anext(stream)).token_ids == (0,)
    reading = asyncio.create_task(anext(stream))
    for token in range(1, 100):
        client.deliver(RequestDelta(id="a", token_ids=(token,)))
        await asyncio.sleep(0)
        if reading.done():
            break
    many = (await reading).token_ids
    assert 20 < len(many) < 40
    for last in (
        RequestDelta(id="a", token_ids=(7,)),
        RequestDelta(id="a", token_ids=(8,), finish=FinishReason.LENGTH),
    ):
        client.deliver(last)
    assert (await anext(stream)).token_ids[-2:] == (7, 8)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_patient_reader_is_told_of_an_engine_that_died_behind_what_it_said() -> None:
    client = Recorder()
    stream = client.generate(request("a"), patient=True)
    client.deliver(RequestDelta(id="a", token_ids=(1,)))
    await anext(stream)
    client.deliver(RequestDelta(id="a", token_ids=(2,)))
    client.die("The engine died.")
    assert (await anext(stream)).token_ids == (2,)
    with pytest.raises(EngineDead):
        await anext(stream)


@pytest.mark.usefixtures("long_ago")
async def test_a_patient_reader_is_woken_where_memory_is_short() -> None:
    client = Recorder()
    stream = client.generate(request("a"), patient=True)
    client.deliver(RequestDelta(id="a", token_ids=(1,)))
    await anext(stream)
    reading = asyncio.create_task(anext(stream))
    client.deliver(RequestDelta(id="a", token_ids=(2,)))
    await asyncio.sleep(0)
    assert not reading.done()
    client.buffers.limit = 1
    client.deliver(RequestDelta(id="a", token_ids=(3,)))
    assert (await reading).token_ids == (2, 3)


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every message wait for a second before it is read."""
    clock = itertools.count()
    monkeypatch.setattr(client_demux, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))


@pytest.mark.advisory("CVE-2025-30202")
@pytest.mark.usefixtures("long_ago")
async def test_a_request_whose_output_is_not_read_is_paused_until_all_of_it_is() -> None:
    client = Recorder()
    stream = client.generate(request("a"))
    logprobs = (TokenLogprobs(1, -0.5, 1, ((1, -0.5),) * 20),)
    for token in range(40):
        client.deliver(RequestDelta(id="a", token_ids=(token,), logprobs=logprobs))
    assert client.sent[1:] == [Pause("a", True)]
    assert 40 * 2400 < client.buffers.used < 40 * 3000
    read: list[int] = []
    while len(read) < 40:
        delta = await anext(stream)
        assert 1 <= len(delta.token_ids) < 10  # others have their turn in between
        assert client.sent[2:] == []
        read += delta.token_ids
    assert read == list(range(40))
    assert client.buffers.used == 0
    more = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert client.sent[2:] == [Pause("a", False)]
    client.deliver(RequestDelta(id="a", token_ids=(40,), finish=FinishReason.LENGTH))
    assert (await more).token_ids == (40,)


@pytest.mark.usefixtures("long_ago")
async def test_when_memory_is_short_any_unread_output_pauses_and_a_dropped_stream_counts_no_more() -> None:
    client = Recorder()
    client.buffers.limit = 700
    stream = client.generate(request("a"))
    client.deliver(RequestDelta(id="a", token_ids=(1,)), RequestDelta(id="a", token_ids=(2,)))
    assert client.sent[1:] == []
    client.deliver(RequestDelta(id="a", token_ids=(3,)))
    assert client.sent[1:] == [Pause("a", True)]
    client.deliver(RequestDelta(id="a", token_ids=(), finish=FinishReason.ABORT))
    assert client.buffers.used > 700
    del stream
    assert client.buffers.used == 0


async def test_what_there_is_no_memory_to_read_ends_its_own_request() -> None:
    client = Recorder()
    large, small = client.generate(request("large")), client.generate(request("small"))
    client._dispatch(Unread(("large",)))
    client.deliver(RequestDelta(id="small", token_ids=(1,)))
    assert client.sent[2:] == [Cancel(("large",))]
    ended = await anext(large)
    assert (ended.finish, "memory" in (ended.error or "")) == (FinishReason.ERROR, True)
    assert (await anext(small)).token_ids == (1,)


async def test_a_lag_of_the_event_loop_is_no_reason_to_pause() -> None:
    client = Recorder()
    stream = client.generate(request("a"))
    client.deliver(*(RequestDelta(id="a", token_ids=(token,)) for token in range(1000)))
    assert len((await anext(stream)).token_ids) > 20
    assert len(client.sent) == 1


async def test_closing_early_cancels_once_and_drops_what_comes() -> None:
    client = Recorder()
    stream = client.generate(request("a"))
    client.deliver(RequestDelta(id="a", token_ids=(1,)))
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert client.sent[1:] == [Cancel(("a",))]
    client.deliver(RequestDelta(id="a", token_ids=(2,)))
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
    for status, error in ((503, UnavailableError), (403, ForbiddenError), (400, RequestError)):
        refused = asyncio.create_task(client.call("z"))
        await asyncio.sleep(0)
        client.answer(CallReply(client.sent[-1].number, error="no", status=status))
        with pytest.raises(error, match="no"):
            await refused


async def test_client_and_engine_socket_talk_over_a_private_socket(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    engine = EngineSocket(path)
    alive = lifeline.hold(path)
    client = ProcessClient(path)
    assert path.stat().st_mode & 0o077 == 0
    await asyncio.to_thread(engine.receive, 0.3)  # hello comes before the model is there, and is not answered
    assert client.health().state == "starting"
    engine.ready = Ready(INFO, 9)
    serving = asyncio.create_task(asyncio.to_thread(_serve_one, engine))
    await asyncio.wait_for(client.wait_ready(), 120)
    assert client.info == INFO
    deltas = [d async for d in client.generate(request("a"))]
    assert [token for d in deltas for token in d.token_ids] == [7, 8]
    await serving
    os.close(alive)  # as when the engine's process ends
    async with asyncio.timeout(120):
        while client.health().state != "dead":
            await asyncio.sleep(0.02)
    await client.close()
    engine.close()
    assert not path.exists()


def _received(engine: EngineSocket, kind: type) -> tuple[bytes, Any]:
    """Return the first message of a kind, and its sender. Greetings are answered meanwhile."""
    for _ in range(1200):
        for peer, message in engine.receive(0.1):
            if isinstance(message, kind):
                return peer, message
    raise TimeoutError


def _serve_one(engine: EngineSocket) -> None:
    peer, message = _received(engine, Submit)
    engine.send(peer, Deltas((RequestDelta(id=message.request.id, token_ids=(7,)),)))
    engine.send(peer, Deltas((RequestDelta(id=message.request.id, token_ids=(8,), finish=FinishReason.LENGTH),)))


@pytest.mark.advisory("CVE-2024-9052")
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
    for _ in range(1200):
        messages += [message for _, message in engine.receive(0.1)]
        if messages:
            break
    assert messages == [Cancel(("a",))]
    peer.close(0)
    context.term()
    engine.close()


def test_boot_message_survives_the_pipe() -> None:
    boot = Boot(
        name="x-0", role="api", config=resolve(Config()), plugins=Plugins(), socket_path="/x", listen_fd=3, alive_fd=4
    )
    assert msgspec.json.decode(msgspec.json.encode(boot), type=Boot) == boot


def test_bind_says_that_a_port_is_taken() -> None:
    with own_port() as port:
        with bind("127.0.0.1", port) as taken:
            assert base_url(taken, resolve(Config())) == f"http://127.0.0.1:{port}"
            with pytest.raises(StartupError, match=f"port {port}"):
                bind("127.0.0.1", port)
        socket.create_server(("127.0.0.1", port)).close()  # it is given back
    with bind(None, 0) as everywhere:
        assert base_url(everywhere, resolve(Config())).startswith("http://127.0.0.1:")
    with pytest.raises(StartupError, match="the name is not known"):
        bind("no.such.host.invalid", 0)


@pytest.mark.advisory("CVE-2024-9052", "CVE-2025-23310")
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


def test_a_unix_socket_replaces_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "s"
    front = FrontendConfig(uds=str(path))
    with listening(front) as first:
        assert base_url(first, resolve(Config(frontend=front))) == f"http+unix://{str(path).replace('/', '%2F')}"
        with pytest.raises(StartupError, match="a server is listening there"), listening(front):
            pass
        first.close()  # as when its process is killed: the file stays
        assert path.is_socket()
        with listening(front):
            assert path.is_socket()
        assert not path.exists()
    path.write_text("mine")
    with pytest.raises(StartupError, match="is not a socket"), listening(front):
        pass
    assert path.read_text() == "mine"
    for bad, reason in ((tmp_path / "no" / "s", "no such file"), (tmp_path / ("x" * 200), "too long")):
        with pytest.raises(StartupError, match=reason), listening(FrontendConfig(uds=str(bad))):
            pass


def test_api_processes_share_a_socket_and_a_second_server_has_none() -> None:
    three = FrontendConfig(host="127.0.0.1", api_server_count=3)
    with own_port() as port, listening(dataclasses.replace(three, port=port)) as listener, listener:
        assert listener.getsockname()[1] == port
        for count in (1, 2):
            front = FrontendConfig(host="127.0.0.1", port=port, api_server_count=count)
            with pytest.raises(StartupError, match=f"port {port}"), listening(front):
                pass


def test_processes_read_each_others_numbers(tmp_path: Path) -> None:
    path = tmp_path / "board"
    launcher = Board.create(path, 3)
    engine, *apis = (Board(path, row) for row in range(4))
    assert (engine.rows, engine.ready, apis[0].leads, apis[1].leads) == (4, False, True, False)
    assert apis[2].shared == (tmp_path, 2)
    for number, board in enumerate(apis):
        board.add(WAITING, number + 1)
        board.put(READY, 1)
        assert board.ready is (number == 2)
    apis[1].add(WAITING, -1)
    assert {board.total(WAITING) for board in (launcher, *apis)} == {5}
    engine.put(BEAT, 12.5)
    assert apis[2].get(BEAT) == launcher.get(BEAT, ENGINE) == 12.5


def test_one_process_has_a_board_of_its_own() -> None:
    one, other = Board(), Board()
    one.add(WAITING, 2)
    assert (one.total(WAITING), other.total(WAITING)) == (2, 0)
    assert (one.ready, one.leads, one.shared) == (True, True, None)


@pytest.mark.advisory("CVE-2026-114051")
async def test_an_engine_without_a_heartbeat_or_progress_is_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineSocket(tmp_path / "engine.sock")
    engine.ready = Ready(INFO, 9)
    Board.create(tmp_path / "board", 1)
    beats, board = Board(tmp_path / "board", ENGINE), Board(tmp_path / "board", 1)
    alive = lifeline.hold(tmp_path / "engine.sock")
    client = ProcessClient(tmp_path / "engine.sock", board, 30.0)
    serving = asyncio.create_task(asyncio.to_thread(_received, engine, Call))
    await asyncio.wait_for(client.wait_ready(), 120)
    now = 1000.0
    monkeypatch.setattr(board_module, "time", SimpleNamespace(monotonic=lambda: now))
    beats.put(BEAT, now)
    assert client.health().state == "starting"  # this process has not said that it could serve
    board.put(READY, 1)
    assert client.health().state == "ready"
    beats.put(BEAT, now - 11)
    assert client.health().state == "stalled"
    assert "11 s" in client.health().detail
    beats.put(BEAT, now)
    beats.put(STALLED, 14)  # a long step
    assert client.health().state == "ready"
    beats.put(STALLED, 16)
    assert client.health().state == "stalled"
    beats.put(STALLED, 0)
    assert client.health().state == "ready"
    await serving
    await client.close()
    os.close(alive)
    engine.close()


@pytest.mark.parametrize(("pauses", "waits"), [((0.0, 0.0, 0.0), 3.0), ((0.0, 0.0, 60.0), 0.0)])
def test_time_in_which_all_of_the_process_was_stopped_is_no_stall(
    monkeypatch: pytest.MonkeyPatch, pauses: tuple[float, ...], waits: float
) -> None:
    """Let the watchdog look, sleep a second plus a pause, and look again, until the loop is over."""

    class Loop:
        began = 97.0
        ended = False

        def stalled_for(self, now: float) -> float:
            return now - self.began

    loop = Loop()
    clock, left = VirtualClock(100.0), list(pauses)
    board = Board()

    def sleep(seconds: float) -> None:
        if left:
            clock.advance(seconds + left.pop(0))
        else:
            loop.ended = True

    started: list[Callable[[], None]] = []
    monkeypatch.setattr(engine_main, "time", SimpleNamespace(monotonic=clock, sleep=sleep))

    def thread(target: Callable[[], None], **_: object) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: started.append(target))

    monkeypatch.setattr(engine_main, "threading", SimpleNamespace(Thread=thread))
    engine_main.watch_progress(loop, 30.0, board)  # type: ignore[arg-type]
    started[0]()
    assert board.get(STALLED) == waits
    assert board.get(BEAT) == clock()


def test_percentiles_and_prompts() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([], 99) == 0.0
    prompts = random_prompts(3, 8, 5, (10, 20), 1)
    assert prompts == random_prompts(3, 8, 5, (10, 20), 1)
    assert {tuple(p[:5]) for p in prompts} == {tuple(prompts[0][:5])}
    assert len({tuple(p) for p in prompts}) == 3
    lengths = {len(p) for p in random_prompts(200, 25, 5, (10, 20), 1, spread=0.5)}
    assert (min(lengths), max(lengths)) == (5 + 10, 5 + 30)
    assert {len(p) for p in random_prompts(50, 1, 0, (10, 20), 1, spread=1.0)} == {1, 2}


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


def test_a_distribution_that_cannot_be_read_does_not_keep_torch_away(site: Any) -> None:
    """Import torch, which would look for back ends among all distributions; `before_libraries` asks it not to, as a
    default.
    """
    broken = site.folder / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Name: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_bytes(b"[torch.backends]\nx = \xff\xfe:y\n")
    code = "from ferrule.env import before_libraries as b\nb()\nimport torch\nprint(torch.ones(2).sum().item())"
    done = site.python("-c", code)
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    assert site.python("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="1").returncode != 0


def test_numpy_starts_no_threads_in_the_servers_processes(site: Any) -> None:
    code = "from ferrule.env import before_numpy as b\nb()\nimport os, numpy\nprint(len(os.listdir('/proc/self/task')))"
    assert site.python("-c", code).stdout == "1\n"


def test_what_the_system_lacks_at_a_start_is_one_block() -> None:
    def told(number: int) -> str:
        return str(as_startup_error(OSError(number, os.strerror(number), "/a/file")))

    assert "Too many files are open: /a/file" in told(errno.EMFILE)
    assert "cannot be written: /a/file" in told(errno.ENOSPC)
    assert "cannot be read or written: /a/file" in told(errno.EIO)
    assert "not enough memory" in told(errno.ENOMEM)
    assert as_startup_error(OSError(errno.ENOENT, "no", "/a/file")) is None
