"""How many guesses are asked for: as many as pay, which depends on the load and on how many are right."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby, pairwise

import pytest

from ferrule.engine.guess_loads import NEVER, Loads
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.scheduler import GuessLimits, SchedulerLimits
from ferrule.types import CacheGroup, EngineRequest, EngineStats, FinishReason, StepPlan, StepResult, TokenSampling
from ferrule_plugins.policy.fcfs import FcfsPolicy
from ferrule_testkit.fakes import FakeDevice, FakeModel, VirtualClock, solo
from tests.shared import grid

MOST = 5
WINDOW = CacheGroup("sliding", 16, 4)  # steps of the fake device take the same time for any length


def request_of(row: int) -> EngineRequest:
    """Return the request of a row."""
    return EngineRequest(id=f"r{row}", prompt_ids=(row % 50, 1, 2), work=TokenSampling(seed=row, max_tokens=1800))


@cache
def text(row: int, groups: tuple[CacheGroup, ...]) -> Sequence[int]:
    """Return the prompt and the answer of a row."""
    request = request_of(row)
    return [*request.prompt_ids, *solo(FakeModel(groups, 50), request, 3000).token_ids]


class Engine:
    """A scheduler on a fake device: steps take as long as `seconds` says, and guesses are right by chance."""

    def __init__(
        self,
        rows: int,
        guesses: GuessLimits,
        seconds: Callable[[StepPlan], float],
        chance: float,
        groups: tuple[CacheGroup, ...] = (WINDOW,),
    ) -> None:
        limits = SchedulerLimits(
            groups=groups,
            num_blocks=200 * rows + 1,
            max_num_seqs=rows,
            max_num_batched_tokens=512,
            max_model_len=3000,
            guesses=guesses,
        )
        model = FakeModel(limits.groups, 50)
        self.scheduler = DefaultScheduler(limits, FcfsPolicy())
        self.device = FakeDevice(model, limits.num_blocks, guess=self._guess)
        self.clock, self._seconds, self._chance, self._draw = VirtualClock(), seconds, chance, random.Random(0)
        self._texts: dict[str, Sequence[int]] = {}
        for row in range(rows):
            request = request_of(row)
            self._texts[request.id] = text(row, groups)
            self.scheduler.add(request, self.clock.now)

    def _guess(self, id: str, ids: Sequence[int]) -> tuple[int, ...]:
        right = self._texts[id][len(ids) : len(ids) + MOST]
        return tuple(id if self._draw.random() < self._chance else 49 - id for id in right)

    def run(self, steps: int, depth: int = 1) -> list[StepPlan]:
        """Run steps, `depth` in flight: the device computes one after the other."""
        plans: list[StepPlan] = []
        in_flight: deque[tuple[StepPlan, StepResult, float]] = deque()
        free = 0.0  # when the device is
        for _ in range(steps):
            while len(in_flight) < depth and (plan := self.scheduler.schedule(self.clock.now)) is not None:
                result = self.device.run(plan)
                free = max(free, self.clock.now) + self._seconds(plan)
                in_flight.append((plan, result, free))
                plans.append(plan)
            if not in_flight:
                break
            plan, result, end = in_flight.popleft()
            self.clock.advance(max(0.0, end - self.clock.now))
            self.scheduler.commit(plan, result, self.clock.now)
        return plans

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats()


def step_seconds(each: float, asking: float = 0.0) -> Callable[[StepPlan], float]:
    """Return the time of a step of 10 ms, with `each` for each token, and `asking` if guesses are made."""
    draw = random.Random(1)

    def seconds(plan: StepPlan) -> float:
        makes = asking if any(chunk.wanted for chunk in plan.chunks) else 0.0
        return (0.010 + each * plan.num_tokens + makes) * draw.uniform(0.97, 1.05)

    return seconds


def speed(
    rows: int, chance: float, each: float, asking: float = 0.0, most: int = MOST, steps: int = 250, depth: int = 1
) -> float:
    """Return tokens per second."""
    engine = Engine(rows, GuessLimits(most=most), step_seconds(each, asking), chance)
    engine.run(steps, depth)
    return engine.stats.generation_tokens / engine.clock.now


@grid(
    {
        "rows,each,asking": [
            (32, 0.001, 0.0),
            (32, 0.001, 0.01),
            (32, 0.0003, 0.002),
            (4, 0.002, 0.001),
            (1, 0.0001, 0.02),
        ],
        "chance": [0.0, 0.5, 0.9],
    }
)
def test_guesses_never_cost_more_than_three_percent(rows: int, each: float, asking: float, chance: float) -> None:
    plain = speed(rows, chance, each, most=0)
    assert speed(rows, chance, each, asking) > 0.97 * plain


@pytest.mark.parametrize(("chance", "least"), [(0.3, 0.97), (0.5, 1.3)])
def test_two_steps_in_flight_are_not_half_empty(chance: float, least: float) -> None:
    """Rows without guesses do not run on alone while the result of the others is awaited."""
    plain = speed(8, chance, 0.0003, most=0, steps=200, depth=2)
    assert speed(8, chance, 0.0003, steps=200, depth=2) > least * plain


def test_what_a_guess_costs_is_learnt_though_all_rows_have_as_many() -> None:
    assert speed(32, 0.9, 0.00005, steps=200) > 2 * speed(32, 0.9, 0.00005, most=0, steps=200)


@pytest.mark.parametrize("times", [range(3), range(5, 7), range(20, 26)])
@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_a_few_steps_of_any_length_do_not_end_guesses(times: range, seconds: float) -> None:
    """The machine may sleep, or record what it launches for the first time."""
    usual, count = step_seconds(0.0001), itertools.count()
    engine = Engine(8, GuessLimits(most=1), lambda plan: seconds if next(count) in times else usual(plan), 0.9)
    late = engine.run(660)[-100:]
    assert sum(chunk.drafts for plan in late for chunk in plan.chunks) > 4 * len(late)


@pytest.mark.parametrize(("chance", "gain"), [(0.9, 3.0), (0.6, 1.7)])
@pytest.mark.parametrize("rows", [1, 8])
def test_guesses_that_cost_little_bring_what_they_can(rows: int, chance: float, gain: float) -> None:
    """Of five guesses that are right with this chance, 1 + c + … + c^5 tokens come of a step."""
    assert speed(rows, chance, 0.00005) > gain * speed(rows, chance, 0.00005, most=0)


def test_more_rows_get_fewer_guesses() -> None:
    means = []
    for rows in (1, 8, 32):
        engine = Engine(rows, GuessLimits(most=MOST), step_seconds(0.0006), 0.7)
        plans = engine.run(300)
        means.append(sum(c.drafts for plan in plans for c in plan.chunks) / sum(len(plan.chunks) for plan in plans))
    assert means[0] > 2 > means[2]
    assert means[0] > means[1] > means[2]


def test_a_request_whose_guesses_fail_is_left_alone_and_tried_again() -> None:
    engine = Engine(2, GuessLimits(most=MOST), step_seconds(0.001), 0.9)
    engine._texts["r1"] = [49 - id for id in engine._texts["r1"]]
    plans = [plan for plan in engine.run(250)[50:] if len(plan.chunks) == 2]
    drafts = {name: [c.drafts for plan in plans for c in plan.chunks if c.id == name] for name in ("r0", "r1")}
    assert sum(drafts["r0"]) > 8 * sum(drafts["r1"])
    late = [count for count in drafts["r1"][-150:] if count]
    assert late
    assert max(late) <= 3


def test_where_no_request_has_ideas_a_new_one_is_seldom_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has some is asked at each token again."""
    engine = Engine(6, GuessLimits(most=MOST), step_seconds(0.0001), 0.9)
    make, speaks = engine._guess, False
    monkeypatch.setattr(engine.device, "_guess", lambda id, ids: make(id, ids) if speaks else ())

    def asked(plans: Sequence[StepPlan]) -> float:
        chunks = [chunk for plan in plans for chunk in plan.chunks if chunk.id == "r6"]
        assert len(chunks) >= 34
        return sum(chunk.wanted > 0 for chunk in chunks) / len(chunks)

    engine.run(100)
    engine.scheduler.cancel([f"r{row}" for row in range(6)], FinishReason.ABORT, engine.clock.now)
    engine._texts["r6"] = text(6, (WINDOW,))
    engine.scheduler.add(request_of(6), engine.clock.now)
    assert 0 < asked(engine.run(40)) < 0.15
    speaks = True
    engine.run(40)
    assert asked(engine.run(40)) > 0.9


def test_without_adaption_each_row_gets_all() -> None:
    engine = Engine(4, GuessLimits(most=3, adaptive=False), step_seconds(0.01), 0.0)
    plans = engine.run(50)
    assert {c.drafts for plan in plans[1:] for c in plan.chunks} == {3}
    assert (engine.stats.drafts, engine.stats.draft_tokens) == (4 * 49, 4 * 49 * 3)
    assert engine.stats.accepted_by_place == ()


@pytest.mark.parametrize("chance", [0.0, 0.6])
def test_recurrent_states_are_not_computed_again_for_more_than_a_few_tokens(chance: float) -> None:
    """States go back to where they were before a chunk with a wrong guess; see `StateStore.rewind`."""
    groups = (WINDOW, CacheGroup("recurrent", 16))
    plans = Engine(2, GuessLimits(most=3, adaptive=False), step_seconds(0.01), chance, groups).run(200)
    certain: dict[str, int] = {}
    again, guesses = [], 0
    for chunk, after in [(c, d) for plan, later in pairwise(plans) for c in plan.chunks for d in later.chunks]:
        if chunk.id == after.id:
            guesses += chunk.drafts
            again.append(chunk.start - certain.get(chunk.id, 0))
            if after.start == chunk.start + chunk.count:
                certain[chunk.id] = after.start
    assert max(again) in range(16, 25)
    assert guesses > 0.7 * 3 * len(again)


@pytest.mark.parametrize("limits", [{"max_requests": 3}, {"max_len": 3}, {"most": 0}])
def test_limits_switch_guesses_off(limits: dict[str, int]) -> None:
    guesses = GuessLimits(**{"most": 3, "adaptive": False, **limits})  # type: ignore[arg-type]
    plans = Engine(4, guesses, step_seconds(0.0), 1.0).run(20)
    assert not any(chunk.wanted or chunk.drafts for plan in plans for chunk in plan.chunks)


@pytest.mark.parametrize(
    ("seconds", "steps", "rest"), [(0.0101, 16, 16), (0.012, 16, 128), (0.030, 6, 480), (0.5, 6, 512)]
)
def test_a_rest_is_as_long_as_what_was_lost(seconds: float, steps: int, rest: int) -> None:
    """Lose a fortieth of the time; at most 512 plain steps follow."""
    loads, seen = Loads(), []
    for _ in range(1200):
        guessing = loads.bar(8) < NEVER
        loads.observe(8, guessing, 8 * guessing, 8, seconds if guessing else 0.010)
        seen.append(guessing)
    runs = [(guessing, len(list(group))) for guessing, group in groupby(seen)]
    assert runs[0] == (False, 4)
    assert runs[1][1] == pytest.approx(steps, abs=1)
    assert runs[2][1] == pytest.approx(rest, rel=0.35)


@pytest.mark.parametrize(("before", "rests"), [(0, True), (64, False)])
def test_what_was_saved_before_counts_against_a_loss(before: int, rests: bool) -> None:
    """Let ten steps be slow, as when the machine does something else."""
    loads = Loads()
    for _ in range(4):
        loads.observe(1, False, 0, 1, 0.010)
    for number in range(before + 10):
        loads.observe(1, True, 4, 5, 0.015 if number < before else 0.080)
    assert (loads.bar(1) >= NEVER) == rests
