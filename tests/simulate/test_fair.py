"""The policy `fair`: keys that always have work are served alike, however many requests each of them has."""

from __future__ import annotations

import random

import pytest

from ferrule.engine.scheduler import DefaultScheduler
from ferrule.engine.shares import Shares
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import CacheGroup, EngineRequest, TokenSampling
from ferrule_plugins.policy.fair import FairPolicy
from ferrule_plugins.policy.fcfs import FcfsPolicy
from ferrule_testkit.fakes import VirtualClock
from ferrule_testkit.simulate import simulate
from tests.fakes.executor import FakeExecutor
from tests.shared import some

GROUPS = (CacheGroup("full", 4),)
LONGEST = 24  # tokens of a prompt and its answer


class Run:
    """One scheduler, and what was computed for each key."""

    def __init__(self, policy: type = FairPolicy) -> None:
        self.executor = FakeExecutor(GROUPS)
        self.executor.init_cache(200)
        limits = SchedulerLimits(
            groups=GROUPS,
            num_blocks=200,
            max_num_seqs=3,
            max_num_batched_tokens=16,
            max_model_len=64,
            prefix_caching=False,
        )
        self.scheduler = DefaultScheduler(limits, policy())
        self.clock = VirtualClock()
        self.computed: dict[str, int] = {}
        self.key_of: dict[str, str] = {}
        self.open: dict[str, int] = {}

    def add(self, key: str, prompt: int, answer: int) -> None:
        id = f"r{len(self.key_of)}"
        self.key_of[id] = key
        self.open[key] = self.open.get(key, 0) + 1
        sampling = TokenSampling(seed=1, max_tokens=answer)
        request = EngineRequest(id=id, prompt_ids=(1,) * prompt, work=sampling, key_name=key)
        self.scheduler.add(request, self.clock.now)

    def step(self) -> None:
        self.clock.advance(1.0)
        plan = self.scheduler.schedule(self.clock.now)
        assert plan is not None
        for chunk in plan.chunks:
            key = self.key_of[chunk.id]
            self.computed[key] = self.computed.get(key, 0) + chunk.count
        for delta in self.scheduler.commit(plan, self.executor.submit(plan).result(), self.clock.now):
            self.open[self.key_of[delta.id]] -= delta.finish is not None
        self.scheduler.check()


@pytest.mark.parametrize("seed", some(range(4)))
def test_keys_with_work_are_served_alike(seed: int) -> None:
    """Keep the bound of virtual token counters: it depends on what runs at once, not on how long the keys have
    worked.
    """
    rng, run = random.Random(seed), Run()
    many = {"flood": 40, "some": 6, "few": 4}
    for _ in range(600):
        for key, count in many.items():
            while run.open.get(key, 0) < count:
                run.add(key, rng.randint(1, 12), rng.randint(1, 12))
        run.step()
    assert max(run.computed.values()) - min(run.computed.values()) <= 2 * 3 * LONGEST
    assert sum(run.computed.values()) > 3000


@pytest.mark.parametrize(("policy", "first"), [(FairPolicy, True), (FcfsPolicy, False)])
def test_a_flood_of_one_key_does_not_delay_another(policy: type, first: bool) -> None:
    run = Run(policy)
    for _ in range(60):
        run.add("flood", 8, 8)
    for _ in range(20):
        run.step()
    run.add("late", 8, 8)
    for _ in range(30):
        run.step()
    assert (run.open["late"] == 0) == first


def test_a_key_that_was_away_saves_nothing_up() -> None:
    shares = Shares()
    shares.enter("a")
    shares.spend("a", 100)
    shares.enter("b")
    assert shares.served("b") == 100
    shares.spend("b", 50)
    shares.leave("b")
    shares.enter("b")
    assert shares.served("b") == 150  # nor is a debt forgotten
    shares.leave("b")
    shares.leave("a")
    shares.enter("c")
    assert shares.served("c") == 0


def test_random_work() -> None:
    """Keep every invariant of the scheduler under this policy."""
    assert simulate(31, 900, policy="fair").requests > 50
