"""The kits of schedulers and policies, which run in the simulator."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.scheduler import RequestView, Scheduler, SchedulerLimits, SchedulingPolicy
from ferrule_testkit.installed import installed_plugins
from ferrule_testkit.kits.base import Kit, promise, shown
from ferrule_testkit.simulate import SchedulerFactory, simulate


class SchedulerKit(Kit):
    """A scheduler keeps the invariants of docs/engine.md under any work, and each request says what it says alone.

    The work is random: arrivals, cancellations, failures of single requests, caches of a few blocks, and the policies
    fcfs, priority, chaos and one that preempts as often as it may.
    """

    kind = "scheduler"
    seeds: Sequence[int] = (1, 2, 3)
    steps: int = 1200

    def test_random_work_one_step_at_a_time(self) -> None:
        """Keep every invariant after every step with one step in flight."""
        self._simulate(1)

    def test_random_work_with_two_steps_in_flight(self) -> None:
        """Keep every invariant with two steps in flight: results come late, and may belong to a former life."""
        self._simulate(2)

    def test_random_work_with_three_steps_in_flight(self) -> None:
        """Keep every invariant with three steps in flight."""
        self._simulate(3)

    def test_the_order_of_the_policy(self) -> None:
        """Admit requests in the order of fcfs, of priority and of priority_ageing. A scheduler with `own_order` may
        admit them in another order, but each of them ends.
        """
        for policy in ("fcfs", "priority", "priority_ageing"):
            simulate(11, self.steps, self._make, policy)

    def test_chaos_and_preemption(self) -> None:
        """Give a request the same output under any order, victim or budget that a policy may choose."""
        for policy in ("chaos", "bully"):
            simulate(12, self.steps, self._make, policy)

    def test_the_same_work_gives_the_same_steps(self) -> None:
        """Decide independently of time, chance and addresses in memory, so that a run can be repeated."""
        first, second = (simulate(13, self.steps // 2, self._make) for _ in range(2))
        promise(first == second, f"two runs of the same work differ: {first} and {second}")

    def _make(self, limits: SchedulerLimits, policy: SchedulingPolicy) -> Scheduler:
        scheduler: Scheduler = self.new(limits, policy, installed_plugins())
        return scheduler

    def _simulate(self, depth: int) -> None:
        for seed in self.seeds:
            simulate(seed, self.steps, self._make, depth=depth)


class PolicyKit(Kit):
    """A policy is pure, answers within its bounds, and nothing that it chooses harms a request."""

    kind = "policy"
    steps: int = 1200

    def make(self) -> SchedulingPolicy:
        policy: SchedulingPolicy = self.new()
        return policy

    # ------------------------------------------------------------------------------------ promises

    def test_random_work_one_step_at_a_time(self) -> None:
        """Keep every invariant of the scheduler under this policy, with random work and tiny caches."""
        simulate(21, self.steps, self._scheduler(), policy="bully", depth=1)

    def test_random_work_with_steps_in_flight(self) -> None:
        """Keep every invariant of the scheduler with two and three steps in flight."""
        for depth in (2, 3):
            simulate(21 + depth, self.steps, self._scheduler(), policy="bully", depth=depth)

    def test_keys_can_be_compared(self) -> None:
        """Return every key as a tuple of finite numbers, all of one length, so that any two requests have an order."""
        policy = self.make()
        keys = [policy.key(view, 100.0) for view in _views(1)]
        for key in keys:
            numbers = isinstance(key, tuple) and key and all(isinstance(part, int | float) for part in key)
            promise(bool(numbers) and all(map(math.isfinite, key)), f"{shown(key)} is not a tuple of finite numbers")
        promise(len({len(key) for key in keys}) == 1, "keys have different lengths")

    def test_the_policy_is_pure(self) -> None:
        """Return the same keys, victims and budgets for the same views, whatever was asked before, from any
        instance.
        """
        views = _views(2)
        used, fresh = self.make(), self.make()
        self._ask(used, _views(3))
        wanted = self._ask(fresh, views)
        promise(self._ask(used, views) == wanted, "an instance that was asked other things before answers otherwise")
        promise(self._ask(used, views) == wanted, "the second answer differs from the first")

    def test_the_victim_is_one_of_those_asked_about(self) -> None:
        """Name a running request in `victim`, also when there is only one."""
        policy, rng = self.make(), random.Random(4)
        for count in (1, 1, 2, 3, 7, 30):
            running = rng.sample(_views(4), count)
            victim = policy.victim(running)
            promise(victim in {view.id for view in running}, f"victim {victim!r} is none of the {count} that run")

    def test_budgets_are_within_their_bounds(self) -> None:
        """Return a whole number from 1 to the limit from `budget`, however many requests run and wait."""
        policy = self.make()
        for limit in (1, 2, 16, 8192):
            for running, waiting in ((0, 0), (0, 1), (1, 0), (1, 1), (256, 0), (0, 10_000), (300, 10_000)):
                budget = policy.budget(running, waiting, limit)
                whole = isinstance(budget, int) and 1 <= budget <= limit
                promise(whole, f"budget({running}, {waiting}, {limit}) is {shown(budget)}")

    def test_refresh_is_a_time_or_none(self) -> None:
        """Have None in `refresh_seconds`, or a finite number that is not negative."""
        seconds = self.make().refresh_seconds
        known = seconds is None or (isinstance(seconds, int | float) and 0 <= seconds < math.inf)
        promise(known, f"refresh_seconds is {shown(seconds)}")

    # ------------------------------------------------------------------------------------ parts

    def _scheduler(self) -> SchedulerFactory:
        """Return a factory of the built-in scheduler that uses this policy instead of the simulator's."""

        def make(limits: SchedulerLimits, policy: SchedulingPolicy) -> Scheduler:
            return DefaultScheduler(limits, self.make())

        return make

    def _ask(self, policy: SchedulingPolicy, views: Sequence[RequestView]) -> list[object]:
        keys: list[object] = [policy.key(view, now) for view in views for now in (100.0, 250.0)]
        victims = [policy.victim(views[:count]) for count in range(1, len(views))]
        return [*keys, *victims, *(policy.budget(running, 3, 64) for running in range(9))]


def _views(seed: int) -> list[RequestView]:
    rng = random.Random(seed)
    views = []
    for sequence in range(1, 41):
        prompt = rng.choice((1, 5, 1000, 100_000))
        known = prompt + rng.choice((0, 1, 50))
        views.append(
            RequestView(
                id=f"r{seed}-{sequence}",
                arrival=rng.choice((0.0, 99.0, 100.0 * rng.random())),
                sequence=sequence,
                priority=rng.choice((0, 0, -1, 1, -(2**31), 2**31)),
                num_prompt=prompt,
                num_known=known,
                num_computed=rng.randint(0, known),
                num_preemptions=rng.choice((0, 0, 1, 8)),
            )
        )
    return views
