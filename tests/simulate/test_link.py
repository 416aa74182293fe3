"""Clients and the engine over a link that loses, doubles and delays messages: never wrong text, and never a wait for
ever. What is lost ends requests with an error; what is doubled changes nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import pytest

from ferrule.client.demux import DeltaStream, DemuxClient
from ferrule.engine.loop import EngineLoop
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import CacheGroup, EngineRequest, FinishReason, RequestDelta, TokenSampling
from ferrule.wire.link import Receiver, Sender
from ferrule.wire.messages import FromEngine, Gap, ToEngine
from ferrule_testkit.fakes import FakeExecutor, VirtualClock, solo
from ferrule_testkit.simulate import load

GROUPS = (CacheGroup("full", 2), CacheGroup("sliding", 2, 5))
LIMITS = SchedulerLimits(
    groups=GROUPS, num_blocks=30, max_num_seqs=6, max_num_batched_tokens=10, max_model_len=34, depth=2
)
NAMES = (b"a", b"b")
F = TypeVar("F")


class Faults:
    """What a link does to a message. `kinds` are those that happen, each to a message of fifty."""

    def __init__(self, rng: random.Random, kinds: Sequence[str]) -> None:
        self.rng = rng
        self.kinds = kinds
        self.seen: Counter[str] = Counter()

    def deliver(self, frame: F, queue: list[F]) -> None:
        kind = self.rng.choice(self.kinds) if self.kinds and self.rng.random() < 0.02 else ""
        self.seen[kind] += 1
        if kind == "late" and queue:
            queue.insert(self.rng.randrange(len(queue)), frame)  # before some that were sent earlier
        elif kind != "lost":
            queue += [frame] * (2 if kind == "doubled" else 1)


class Client(DemuxClient):
    def __init__(self, faults: Faults, numbered: bool) -> None:
        super().__init__()
        self.inbox: list[tuple[int, FromEngine]] = []
        self.outbox: list[tuple[int, ToEngine]] = []
        self._faults = faults
        self._numbered = numbered
        self._sender: Sender[ToEngine] = Sender()
        self._receiver: Receiver[FromEngine] = Receiver()

    def _post(self, message: ToEngine) -> None:
        self._faults.deliver(self._sender.stamp(message), self.outbox)

    def read(self) -> None:
        frames, self.inbox = self.inbox, []
        for frame in frames:
            for message in self._receiver.take(*frame) if self._numbered else frame[1:]:
                self._dispatch(message)  # type: ignore[arg-type]

    async def close(self) -> None:
        self.die("closed")


class Links:
    """The engine's end of all of them."""

    def __init__(self, faults: Faults, numbered: bool) -> None:
        self.faults = faults
        self.clients = {name: Client(faults, numbered) for name in NAMES}
        self._numbered = numbered
        self._senders: dict[bytes, Sender[FromEngine]] = {name: Sender() for name in NAMES}
        self._receivers: dict[bytes, Receiver[ToEngine]] = {name: Receiver() for name in NAMES}

    def receive(self, timeout: float) -> list[tuple[bytes, ToEngine]]:
        found: list[tuple[bytes, ToEngine]] = []
        for name, client in self.clients.items():
            frames, client.outbox = client.outbox, []
            for frame in frames:
                taken = self._receivers[name].take(*frame) if self._numbered else frame[1:]
                found += [(name, message) for message in taken]  # type: ignore[misc]
        return found

    def send(self, client: bytes, message: FromEngine) -> None:
        self.faults.deliver(self._senders[client].stamp(message), self.clients[client].inbox)


def draw(rng: random.Random, number: int) -> EngineRequest:
    prompt = tuple(rng.choice((3, 4)) for _ in range(rng.randint(1, 12)))
    sampling = TokenSampling(seed=number, max_tokens=rng.randint(1, 20), stop_token_ids=(5,))
    return EngineRequest(id=f"r{number}", prompt_ids=prompt, sampling=sampling)


async def collect(stream: DeltaStream) -> list[RequestDelta]:
    return [delta async for delta in stream]


async def run(seed: int, kinds: Sequence[str], numbered: bool = True) -> tuple[Counter[str], Counter[str]]:
    """(how requests ended, what happened to messages). Raises TimeoutError for a request that waits for ever."""
    rng = random.Random(seed)
    executor = FakeExecutor(GROUPS, vocab_size=12)
    executor.init_cache(30)
    links = Links(Faults(rng, kinds), numbered)
    clock = VirtualClock()
    loop = EngineLoop(DefaultScheduler(LIMITS, load("policy", "fcfs")()), executor, links, clock, debug=True)
    open_: dict[str, tuple[EngineRequest, asyncio.Task[list[RequestDelta]]]] = {}
    cancelled: set[str] = set()
    for step in range(1500):
        clock.advance(rng.random() / 50)
        client = links.clients[rng.choice(NAMES)]
        if step < 900 and rng.random() < 0.2:
            request = draw(rng, step)
            open_[request.id] = request, asyncio.create_task(collect(client.generate(request)))
        if open_ and step < 900 and rng.random() < 0.02:
            id = rng.choice(list(open_)[-4:])
            cancelled.add(id)
            for each in links.clients.values():
                each.cancel([id])
        loop.step()
        if step == 1300:
            links.faults.kinds = ()  # what is lost at the very end is noticed with the next message
        for each in links.clients.values():
            each.read()
            if step % 20 == 0:
                each.probe()
        await asyncio.sleep(0)
    assert not loop.scheduler.has_work()
    assert loop.scheduler.stats().blocks_used == 0
    ends: Counter[str] = Counter()
    for id, (request, task) in open_.items():
        deltas = await asyncio.wait_for(task, 0.01)
        said = [token for delta in deltas for token in delta.token_ids]
        alone = solo(executor.model, request, LIMITS.max_model_len)
        assert said == alone.token_ids[: len(said)], id
        finish = deltas[-1].finish
        assert finish in (FinishReason.ERROR, alone.finish) or id in cancelled, (id, finish)
        assert finish is not alone.finish or id in cancelled or said == alone.token_ids, id
        ends[finish.value if finish else "none"] += 1
    return ends, links.faults.seen


@pytest.mark.parametrize("seed", range(4))
def test_requests_end_with_their_text_or_with_an_error(seed: int) -> None:
    ends, seen = asyncio.run(run(seed, ("lost", "doubled", "late")))
    assert seen["lost"] > 3
    assert seen["doubled"] > 3
    assert ends["error"] > 3
    assert ends["stop"] + ends["length"] > 30


def test_doubled_messages_change_nothing() -> None:
    assert asyncio.run(run(7, ("doubled",)))[0]["error"] == 0
    assert asyncio.run(run(7, ()))[0]["error"] == 0


@pytest.mark.parametrize("kind", ["lost", "doubled"])
def test_without_numbers_the_simulation_fails(kind: str) -> None:
    """The test above is worth something: text is wrong, or a request waits for ever."""
    with pytest.raises((AssertionError, TimeoutError)):
        asyncio.run(run(7, (kind,), numbered=False))


def test_numbers() -> None:
    sender, receiver = Sender[str](), Receiver[str]()
    frames = [sender.stamp(text) for text in "abcde"]
    assert receiver.take(*frames[0]) == ("a",)
    assert receiver.take(*frames[0]) == ()
    assert receiver.take(*frames[2]) == (Gap(), "c")
    assert receiver.take(*frames[1]) == ()
    assert receiver.take(*frames[3]) == ("d",)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_more_seeds(seed: int) -> None:
    asyncio.run(run(seed, ("lost", "doubled", "late")))
