"""Clients, and engines that die: never wrong text, never a wait for ever. A request that a dead engine has said
nothing of is done by the next one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from ferrule.client.demux import DeltaStream, DemuxClient
from ferrule.engine.loop import EngineLoop
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.errors import EngineDead
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import CacheGroup, EngineRequest, FinishReason, RequestDelta, TokenSampling
from ferrule.wire.messages import FromEngine, Ready, ToEngine
from ferrule_testkit.fakes import VirtualClock, solo
from ferrule_testkit.simulate import load
from tests.fakes.engine import fake_info
from tests.fakes.executor import FakeExecutor

GROUPS = (CacheGroup("full", 2), CacheGroup("sliding", 2, 5))
LIMITS = SchedulerLimits(
    groups=GROUPS, num_blocks=30, max_num_seqs=6, max_num_batched_tokens=10, max_model_len=34, depth=2
)
NAMES = (b"a", b"b")


class Client(DemuxClient):
    def __init__(self) -> None:
        super().__init__(restarts=True)
        self.connect()

    def connect(self) -> None:
        """Connect anew, as a new socket does: nothing of before is in it."""
        self.inbox: list[FromEngine] = []
        self.outbox: list[ToEngine] = []

    def _post(self, message: ToEngine) -> None:
        self.outbox.append(message)

    def read(self) -> None:
        messages, self.inbox = self.inbox, []
        for message in messages:
            self._dispatch(message)

    def finds(self) -> None:
        """Let the next engine answer."""
        self._dispatch(Ready(fake_info(), 30))

    async def close(self) -> None:
        self.die("closed")


class Engine:
    """One life of an engine, and its end of the links."""

    def __init__(self, clients: dict[bytes, Client], clock: VirtualClock) -> None:
        self._clients = clients
        executor = FakeExecutor(GROUPS, vocab_size=12)
        executor.init_cache(LIMITS.num_blocks)
        self.model = executor.model
        self.loop = EngineLoop(DefaultScheduler(LIMITS, load("policy", "fcfs")()), executor, self, clock, debug=True)

    def receive(self, timeout: float) -> list[tuple[bytes, ToEngine]]:
        found: list[tuple[bytes, ToEngine]] = []
        for name, client in self._clients.items():
            messages, client.outbox = client.outbox, []
            found += [(name, message) for message in messages]
        return found

    def send(self, client: bytes, message: FromEngine) -> None:
        self._clients[client].inbox.append(message)


class World:
    """Random requests and cancellations from two clients. `run` returns how requests ended."""

    def __init__(self, seed: int, deaths: float) -> None:
        self.rng = random.Random(seed)
        self.deaths = deaths  # chance of one in a step
        self.clock = VirtualClock()
        self.clients = {name: Client() for name in NAMES}
        self.open: dict[str, tuple[EngineRequest, asyncio.Task[list[RequestDelta]]]] = {}
        self.heard: dict[str, list[RequestDelta]] = {}
        self.cancelled: set[str] = set()
        self.engine = self.new_engine()
        self.without_engine = 0  # steps left

    def new_engine(self) -> Engine:
        return Engine(self.clients, self.clock)

    async def run(self) -> Counter[str]:
        for step in range(1500):
            self.clock.advance(self.rng.random() / 50)
            if step < 900:
                self.disturb(step)
            if self.without_engine:
                self.without_engine -= 1
                self.restart() if not self.without_engine else None
            else:
                self.engine.loop.step()
            for client in self.clients.values():
                client.read()
            await asyncio.sleep(0)
        assert not self.engine.loop.scheduler.has_work()
        assert self.engine.loop.scheduler.stats().blocks_used == 0
        return Counter([await self.judge(*each) for each in self.open.values()])

    def disturb(self, step: int) -> None:
        rng = self.rng
        if rng.random() < 0.2:
            request = draw(rng, step)
            stream = rng.choice(list(self.clients.values())).generate(request, patient=len(request.prompt_ids) % 2 == 0)
            self.open[request.id] = request, asyncio.create_task(self.collect(request.id, stream))
        if self.open and rng.random() < 0.02:
            id = rng.choice(list(self.open)[-4:])
            self.cancelled.add(id)
            for client in self.clients.values():
                client.cancel([id])
        if rng.random() < self.deaths and not self.without_engine:
            self.without_engine = rng.randint(1, 20)
            for client in self.clients.values():
                if rng.random() < 0.5:
                    client.read()  # some of its last words arrive
                client.lose("The engine died.")

    def restart(self) -> None:
        for client in self.clients.values():
            client.connect()
        self.engine = self.new_engine()
        for client in self.clients.values():
            client.finds()

    async def collect(self, id: str, stream: DeltaStream) -> list[RequestDelta]:
        said = self.heard.setdefault(id, [])
        async for delta in stream:
            said.append(delta)
        return said

    async def judge(self, request: EngineRequest, task: asyncio.Task[list[RequestDelta]]) -> str:
        """Return how a request ended. Raises TimeoutError where it still waits."""
        alone = solo(self.engine.model, request, LIMITS.max_model_len)
        try:
            deltas = await asyncio.wait_for(task, 0.01)
        except EngineDead:
            deltas = [*self.heard[request.id], RequestDelta(id=request.id, finish=FinishReason.ERROR)]
        said = [token for delta in deltas for token in delta.token_ids]
        finish = deltas[-1].finish
        if request.id not in self.cancelled:
            assert finish in (FinishReason.ERROR, alone.finish), (request.id, finish)
            assert finish is FinishReason.ERROR or said == alone.token_ids, request.id
        assert said == alone.token_ids[: len(said)], request.id
        assert finish is not None
        return finish.value


def draw(rng: random.Random, number: int) -> EngineRequest:
    prompt = tuple(rng.choice((3, 4)) for _ in range(rng.randint(1, 12)))
    sampling = TokenSampling(seed=number, max_tokens=rng.randint(1, 20), stop_token_ids=(5,))
    return EngineRequest(id=f"r{number}", prompt_ids=prompt, work=sampling)


async def test_without_deaths_nothing_ends_in_an_error() -> None:
    ends = await World(7, deaths=0.0).run()
    assert ends["error"] == 0
    assert ends["stop"] + ends["length"] > 30


async def test_engines_that_die_leave_nobody_waiting() -> None:
    world = World(11, deaths=0.02)
    ends = await world.run()
    restarts = {client.stats().restarts for client in world.clients.values()}
    assert len(restarts) == 1
    assert restarts.pop() > 5
    assert ends["error"] > 3
    assert ends["stop"] + ends["length"] > 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
async def test_more_seeds(seed: int) -> None:
    await World(seed, deaths=(seed % 3) / 100).run()
