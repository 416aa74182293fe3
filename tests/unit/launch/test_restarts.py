"""Restarts of the engine without engines: when, what its clients do meanwhile, and what must be gone first."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ferrule.client.demux import DemuxClient
from ferrule.client.process import ProcessClient
from ferrule.config import Config, FrontendConfig, ParallelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError, EngineDead
from ferrule.launch.group import kill_group
from ferrule.launch.restarts import HEALTHY_SECONDS, Restarts
from ferrule.shared_memory.board import BEAT, ENGINE_NUMBER, READY, STALLED, Board
from ferrule.types import CacheGroup, EngineRequest, EngineStats, FinishReason, ModelInfo, RequestDelta, TokenSampling
from ferrule.wire import lifeline
from ferrule.wire.messages import Cancel, Deltas, Ready, Submit, ToEngine

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
    """A client whose messages go to a list, with an engine that is there."""

    def __init__(self, board: Board | None = None) -> None:
        super().__init__(board, restarts=True)
        self.sent: list[ToEngine] = []
        self.comes()

    def _post(self, message: ToEngine) -> None:
        self.sent.append(message)

    def comes(self) -> None:
        self._dispatch(Ready(INFO, 9))

    def says(self, *deltas: RequestDelta, steps: int = 1) -> None:
        self._dispatch(Deltas(deltas, EngineStats(steps=steps, running=len(deltas), waiting=3)))

    async def close(self) -> None:
        self.die("closed")


def request(name: str) -> EngineRequest:
    return EngineRequest(id=name, prompt_ids=(1, 2), work=TokenSampling(seed=0, max_tokens=4))


# ------------------------------------------------------------------------------------------ when


def test_pauses_grow_and_end() -> None:
    restarts = Restarts(8)
    assert restarts.pause(5.0) == 1
    assert [restarts.pause(None) for _ in range(8)] == [2, 4, 8, 16, 32, 60, 60, None]
    assert restarts.pause(HEALTHY_SECONDS) == 1  # asked again, it would count anew


def test_an_engine_that_served_for_long_starts_the_count_anew() -> None:
    restarts = Restarts(2)
    assert [restarts.pause(1.0), restarts.pause(1.0)] == [1, 2]
    assert restarts.pause(HEALTHY_SECONDS) == 1
    assert [restarts.pause(1.0), restarts.pause(HEALTHY_SECONDS - 1)] == [2, None]


def test_what_never_served_is_not_started_again() -> None:
    restarts = Restarts(3)
    assert restarts.pause(None) is None
    assert restarts.pause(0.0) == 1
    assert restarts.pause(None) == 2  # it may be that the memory was not free yet


def test_without_the_option_an_engine_is_never_started_again() -> None:
    assert Restarts(0).pause(HEALTHY_SECONDS) is None


def test_one_process_has_no_engine_to_start_again() -> None:
    config = Config(
        frontend=FrontendConfig(disable_frontend_multiprocessing=True), parallel=ParallelConfig(engine_restarts=1)
    )
    with pytest.raises(ConfigError, match="--engine-restarts needs an engine with a process of its own"):
        resolve(config)


# ------------------------------------------------------------------------------------------ its clients


async def test_what_was_not_answered_is_submitted_again_and_the_rest_fails() -> None:
    client = Recorder()
    begun, waiting = client.generate(request("begun")), client.generate(request("waiting"))
    call = asyncio.create_task(client.call("stats"))
    await asyncio.sleep(0)
    client.says(RequestDelta(id="begun", token_ids=(1,)))
    del client.sent[:]
    client.lose("It has died.")
    assert (client.health().state, client.health().detail[:24]) == ("starting", "The engine has stopped a")
    assert await anext(begun) == RequestDelta(id="begun", token_ids=(1,))  # what had come is still read
    with pytest.raises(EngineDead, match="It has died"):
        await anext(begun)
    with pytest.raises(EngineDead):
        await call
    with pytest.raises(EngineDead, match="started again"):
        await client.call("stats")
    client.comes()
    assert client.sent == [Submit(request("waiting"))]
    client.says(RequestDelta(id="waiting", token_ids=(7, 8), finish=FinishReason.LENGTH))
    assert [delta.token_ids async for delta in waiting] == [(7, 8)]


async def test_a_request_is_submitted_twice_at_most() -> None:
    """Give up a request that kills engines, before it has killed all of them."""
    client = Recorder()
    poison = client.generate(request("poison"))
    client.lose("first")
    client.comes()
    client.lose("second")
    with pytest.raises(EngineDead, match="second"):
        await anext(poison)
    client.comes()
    assert client.sent == [Submit(request("poison"))] * 2


async def test_what_ends_while_no_engine_is_there() -> None:
    """End a deadline, a client that has left, and a beam that goes on, none of which needs the dead engine's reply."""
    client = Recorder()
    late, left = client.generate(request("late")), client.generate(request("left"))
    client.lose("gone")
    client.cancel(["late", "nobody"], FinishReason.ABORT)
    assert [delta.finish async for delta in late] == [FinishReason.ABORT]
    await left.aclose()
    next_beam = client.generate(request("beam"))
    del client.sent[:]
    client.comes()
    assert client.sent == [Submit(request("beam"))]
    client.cancel(["beam"])
    assert client.sent[1:] == [Cancel(("beam",))]
    client.die("closed")
    with pytest.raises(EngineDead, match="closed"):
        await anext(next_beam)


async def test_what_waits_for_an_engine_that_never_comes_ends() -> None:
    client = Recorder()
    waiting = client.generate(request("waiting"))
    client.lose("gone")
    client.die("It is not started again.")
    assert client.health().state == "dead"
    with pytest.raises(EngineDead, match="not started again"):
        await anext(waiting)


async def test_counters_go_on_over_a_restart() -> None:
    client = Recorder()
    client.says(RequestDelta(id="x", token_ids=(1,)), steps=5)
    client.lose("gone")
    assert (client.stats().steps, client.stats().running, client.stats().restarts) == (5, 0, 1)
    client.comes()
    client.says(steps=2)
    assert (client.stats().steps, client.stats().waiting, client.stats().restarts) == (7, 3, 1)
    client.lose("again")
    client.comes()
    client.says(steps=4)
    assert (client.stats().steps, client.stats().restarts) == (11, 2)


async def test_a_server_is_ready_again_when_all_of_its_processes_are(tmp_path: Path) -> None:
    Board.create(tmp_path / "board", 2)
    boards = [Board(tmp_path / "board", row) for row in (1, 2)]
    clients = [Recorder(board) for board in boards]
    for board in boards:
        board.put(READY, 1)
    clients[0].lose("gone")
    assert [client.health().state for client in clients] == ["starting", "starting"]
    clients[1].lose("gone")
    clients[0].comes()
    assert clients[0].health().state == "starting"
    clients[1].comes()
    assert [client.health().state for client in clients] == ["ready", "ready"]


# ------------------------------------------------------------------------------------------ processes


async def test_a_client_follows_the_launchers_word(tmp_path: Path) -> None:
    """Skip an engine that has come and gone in the meantime, and end with the last one."""
    launcher = Board.create(tmp_path / "board", 1)
    first = tmp_path / "engine-0.sock"
    os.close(lifeline.hold(first))  # it died before its client has opened anything
    client = ProcessClient(first, Board(tmp_path / "board", 1), restarts=True)
    for number in (1, 2):
        alive = lifeline.hold(lifeline.socket_path(first, number))
        if number == 1:
            os.close(alive)
    launcher.put(ENGINE_NUMBER, 2)
    async with asyncio.timeout(60):
        while client._number != 2:
            await asyncio.sleep(0.01)
    waiting = asyncio.create_task(client.wait_ready())
    launcher.put(ENGINE_NUMBER, -1)
    os.close(alive)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(waiting, 60)
    await client.close()


async def test_a_fault_of_the_clients_own_task_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tmp_path / "engine-0.sock"
    alive = lifeline.hold(first)
    client = ProcessClient(first)
    monkeypatch.setattr(client, "_on_readable", lambda: 1 / 0)
    with pytest.raises(EngineDead, match="connection to the engine"):
        await asyncio.wait_for(client.wait_ready(), 60)
    await client.close()
    os.close(alive)


def test_the_row_of_a_dead_engine_is_cleared(tmp_path: Path) -> None:
    launcher = Board.create(tmp_path / "board", 1)
    engine = Board(tmp_path / "board")
    for cell in (BEAT, STALLED):
        engine.put(cell, 7.0)
    launcher.engine_ended()
    assert (engine.get(BEAT), engine.get(STALLED)) == (0.0, 0.0)


def test_workers_of_a_dead_engine_are_killed() -> None:
    """Kill workers that ignore signals and hold their parent's output open, which ends when the last of them is
    gone.
    """
    worker = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
    engine = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {worker!r}])"
    with subprocess.Popen([sys.executable, "-c", engine], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        process.wait(60)
        while not kill_group(process.pid):
            pass
        assert process.stdout.read() == b""
    assert kill_group(process.pid)
