"""How long users wait under a scheduler, by simulation: a device whose steps take what its costs say.

Nothing is computed, and no real time passes: the same arguments give the same waits. Prompts share no prefixes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ferrule.engine.costs import work
from ferrule.interfaces.scheduler import Scheduler
from ferrule.types import EngineRequest, RowResult, StepPlan, StepResult, TokenSampling
from ferrule_testkit.fakes import VirtualClock


@dataclass(frozen=True)
class Device:
    """A device's costs, in seconds: of any step, and for each row, token of a prompt, and pair of tokens that attend to
    each other.
    """

    any: float = 0.04
    row: float = 0.001
    prompt_token: float = 0.0011
    pair: float = 1e-7
    noise: float = 0.05  # standard deviation, as part of a step's time

    def seconds(self, plan: StepPlan, rng: random.Random) -> float:
        costs = (self.any, self.row, self.prompt_token, self.pair)
        exact = sum(cost * amount for cost, amount in zip(costs, work(plan.chunks), strict=True))
        return exact * max(0.5, rng.gauss(1.0, self.noise))


@dataclass(frozen=True)
class Client:
    """A client with `count` requests of `prompt` tokens for `output` tokens: each at its time, or when the last one
    ended. A closed loop has no `times`, and begins at `begin`.
    """

    prompt: int
    output: int
    count: int = 1
    begin: float = 0.0
    times: tuple[float, ...] = ()


@dataclass
class Waits:
    """The times that clients waited, in seconds. `gaps` are between two tokens of a request; `first` is by the clients'
    prompt sizes.
    """

    first: dict[int, list[float]] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    total: float = 0.0
    steps: int = 0

    @property
    def firsts(self) -> list[float]:
        return [each for waits in self.first.values() for each in waits]


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the nearest-rank percentile; 0 without values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))] if ranked else 0.0


def run(scheduler: Scheduler, clients: Sequence[Client], device: Device | None = None, seed: int = 0) -> Waits:
    """Serve the clients to the end. A request that ends with an error is an AssertionError."""
    return _Run(scheduler, clients, device or Device(), random.Random(seed)).to_end()


@dataclass
class _Sent:
    client: Client
    number: int  # of the client's requests
    at: float
    last: float = 0.0  # when its last token came
    tokens: int = 0


class _Run:
    def __init__(self, scheduler: Scheduler, clients: Sequence[Client], device: Device, rng: random.Random) -> None:
        self._scheduler = scheduler
        self._device, self._rng = device, rng
        self._clock = VirtualClock()
        self._zero = self._clock.now
        self._due: list[tuple[float, int, Client, int]] = []  # when, tie-breaker, whose, its number
        self._live: dict[str, _Sent] = {}
        self._count = 0
        self._waits = Waits()
        for client in clients:
            numbers = range(client.count) if client.times else range(1)
            for number in numbers:
                self._plan(client, number, client.times[number] if client.times else client.begin)

    def to_end(self) -> Waits:
        while self._due or self._live:
            self._submit()
            plan = self._scheduler.schedule(self._clock.now)
            if plan is None:
                self._clock.now = max(self._clock.now, self._due[0][0])
                continue
            self._clock.advance(self._device.seconds(plan, self._rng))
            self._waits.steps += 1
            self._credit(plan)
        self._waits.total = self._clock.now - self._zero
        return self._waits

    def _plan(self, client: Client, number: int, at: float) -> None:
        self._count += 1
        self._due.append((self._zero + at, self._count, client, number))
        self._due.sort(key=lambda due: due[:2])

    def _submit(self) -> None:
        while self._due and self._due[0][0] <= self._clock.now:
            at, key, client, number = self._due.pop(0)
            sampling = TokenSampling(seed=0, max_tokens=client.output)
            request = EngineRequest(
                id=str(key), prompt_ids=(1,) * client.prompt, work=sampling, arrival=at, cache_salt=str(key)
            )
            self._scheduler.add(request, self._clock.now)
            self._live[request.id] = _Sent(client, number, at)

    def _credit(self, plan: StepPlan) -> None:
        rows = [
            RowResult(id=chunk.id, epoch=chunk.epoch, token_ids=(7,) if chunk.ends else ()) for chunk in plan.chunks
        ]
        now = self._clock.now
        for delta in self._scheduler.commit(plan, StepResult(plan.step, tuple(rows)), now):
            if delta.error is not None:
                raise AssertionError(delta.error)
            sent = self._live[delta.id]
            if sent.tokens:
                self._waits.gaps.append(now - sent.last)
            else:
                self._waits.first.setdefault(sent.client.prompt, []).append(now - sent.at)
            sent.tokens += len(delta.token_ids)
            sent.last = now
            if delta.finish is not None:
                del self._live[delta.id]
                if not sent.client.times and sent.number + 1 < sent.client.count:
                    self._plan(sent.client, sent.number + 1, now - self._zero)
