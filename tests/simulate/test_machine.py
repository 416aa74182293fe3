"""The same world, driven by hypothesis: it searches for short sequences of rules that break an invariant."""

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ferrule.engine.scheduler import DefaultScheduler
from ferrule.types import FinishReason
from ferrule_testkit.simulate import World
from ferrule_testkit.simulate_setup import draw_setup


class SchedulerMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        seed=st.integers(0, 2**16), policy=st.sampled_from(["fcfs", "priority", "priority_ageing", "chaos", "bully"])
    )
    def start(self, seed, policy):
        rng = random.Random(seed)
        self.world = World(draw_setup(rng, policy, None), DefaultScheduler, rng)

    @rule(count=st.integers(1, 4))
    def add(self, count):
        for _ in range(count):
            if len(self.world.ledger.live) < 12:
                self.world.add(self.world.draw_request())

    @precondition(lambda self: self.world.ledger.live)
    @rule(data=st.data())
    def add_again(self, data):
        live = self.world.ledger.live
        assert not self.world.add(live[data.draw(st.sampled_from(sorted(live)))].request)

    @precondition(lambda self: self.world.ledger.live)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def cancel(self, data, reason):
        ids = data.draw(st.lists(st.sampled_from([*sorted(self.world.ledger.live), "nobody"]), min_size=1, max_size=4))
        self.world.cancel(ids, reason)

    @precondition(lambda self: self.world.ledger.live)
    @rule(data=st.data())
    def spoil(self, data):
        self.world.fail(data.draw(st.sampled_from(sorted(self.world.ledger.live))))

    @precondition(lambda self: self.world.ledger.live)
    @rule(data=st.data(), paused=st.booleans())
    def pause(self, data, paused):
        self.world.pause(data.draw(st.sampled_from(sorted(self.world.ledger.live))), paused)

    @rule()
    def reset_cache(self):
        self.world.reset_cache()

    @rule(seconds=st.sampled_from([0.001, 1.0, 3600.0]))
    def wait(self, seconds):
        self.world.clock.advance(seconds)

    @rule(count=st.integers(1, 5))
    def plan(self, count):
        for _ in range(count):
            self.world.plan()

    @rule(count=st.integers(1, 3))
    def end_steps(self, count):
        for _ in range(count):
            self.world.end_step()

    @rule(count=st.integers(1, 20))
    def steps(self, count):
        for _ in range(count):
            if not self.world.plan() or len(self.world.in_flight) >= self.world.limits.depth:
                self.world.end_step()
            self.world.check()

    @invariant()
    def check(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
