"""What steps are expected to take, and how much of one prompts get."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ferrule.engine.costs import StepCosts, Work
from ferrule.engine.pace import _GAP, _balance
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import CacheGroup, EngineRequest, RowResult, StepPlan, StepResult, Targets, TokenSampling
from ferrule_plugins.policy.fcfs import FcfsPolicy
from tools.benchmarks.timed import Device

SLOW, FAST = Device(noise=0.0), Device(any=0.005, row=0.0002, prompt_token=0.00005, pair=1e-9, noise=0.0)
MIXED = Work(1.0, 12, 300, 40_000)
PLAIN = Work(1.0, 20, 0, 9_000)


def exact(device: Device, work: Work) -> float:
    costs = (device.any, device.row, device.prompt_token, device.pair)
    return sum(cost * amount for cost, amount in zip(costs, work, strict=True))


def learn(costs: StepCosts, device: Device, steps: int, rng: random.Random, prompts: bool = True) -> None:
    for _ in range(steps):
        rows = rng.randint(1, 40)
        tokens = rng.choice((0, rng.randint(2, 600))) if prompts else 0
        work = Work(1.0, rows, tokens, rows * 200 + tokens * rng.randint(100, 2000))
        costs.observe(work, exact(device, work) * rng.gauss(1.0, 0.05))


# ------------------------------------------------------------------------------------------ costs


@pytest.mark.parametrize("device", [SLOW, FAST])
@pytest.mark.parametrize("work", [MIXED, PLAIN])
def test_costs_are_learnt_from_a_few_steps(device: Device, work: Work) -> None:
    costs = StepCosts(64)
    learn(costs, device, 40, random.Random(1))
    assert costs.seconds(work) == pytest.approx(exact(device, work), rel=0.15)


def test_costs_follow_a_machine_that_gets_slower() -> None:
    costs, slower = StepCosts(64), replace(SLOW, any=0.12, row=0.003, prompt_token=0.0033)
    learn(costs, SLOW, 300, random.Random(2))
    learn(costs, slower, 300, random.Random(3))
    assert costs.seconds(MIXED) == pytest.approx(exact(slower, MIXED), rel=0.15)


def test_a_step_that_waited_for_something_else_changes_little() -> None:
    costs = StepCosts(64)
    learn(costs, SLOW, 100, random.Random(4))
    before = costs.seconds(MIXED)
    costs.observe(MIXED, 30.0)
    assert costs.seconds(MIXED) == pytest.approx(before, rel=0.1)


def test_steps_without_prompts_do_not_drive_out_what_prompts_cost() -> None:
    costs = StepCosts(64)
    learn(costs, FAST, 60, random.Random(5))
    learn(costs, FAST, 3000, random.Random(6), prompts=False)
    assert costs.seconds(MIXED) == pytest.approx(exact(FAST, MIXED), rel=0.15)


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.3, 1e6])
def test_no_time_makes_costs_senseless(seconds: float) -> None:
    costs = StepCosts(64)
    for _ in range(2000):
        costs.observe(MIXED, seconds)
        costs.observe(PLAIN, seconds)
    assert 0.0 <= costs.seconds(PLAIN) <= 2e6


# ------------------------------------------------------------------------------------------- pace

Make = Callable[..., DefaultScheduler]


def make(**more: Any) -> DefaultScheduler:
    limits: dict[str, Any] = {
        "groups": (CacheGroup("full", 16),),
        "num_blocks": 4000,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": 8192,
        "prompt_share": 2,
        **more,
    }
    return DefaultScheduler(SchedulerLimits(**limits), FcfsPolicy())


def request(id: str, prompt: int, arrival: float = 0.0, tokens: int = 200, **targets: float) -> EngineRequest:
    sampling = TokenSampling(seed=0, max_tokens=tokens)
    return EngineRequest(
        id=id,
        prompt_ids=(1,) * prompt,
        work=sampling,
        arrival=arrival,
        cache_salt=id,
        targets=Targets(**targets),
    )


class Clock:
    """A clock that runs steps of a scheduler on a device."""

    def __init__(self, scheduler: DefaultScheduler, device: Device = SLOW) -> None:
        self.scheduler, self.device, self.now = scheduler, device, 0.0

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now)
        assert plan is not None
        self.now += self.device.seconds(plan, random.Random(0))
        rows = tuple(
            RowResult(id=each.id, epoch=each.epoch, token_ids=(7,) if each.ends else ()) for each in plan.chunks
        )
        self.scheduler.commit(plan, StepResult(plan.step, rows), self.now)
        return plan

    def warm(self, decoding: int, **targets: float) -> None:
        """Let `decoding` requests decode, until the cost of steps is known."""
        for number in range(decoding):
            self.scheduler.add(request(f"d{number}", 64, self.now, **targets), self.now)
        self.scheduler.add(request("teacher", 700, self.now), self.now)
        for _ in range(20):
            self.step()


def prompt_tokens(plan: StepPlan) -> int:
    return sum(chunk.count for chunk in plan.chunks if chunk.count > 1)


def test_a_step_with_prompts_takes_what_the_target_between_tokens_allows() -> None:
    for target in (0.15, 0.3, 0.6):
        clock = Clock(make(targets=Targets(inter_token=target)))
        clock.warm(4)
        clock.scheduler.add(request("long", 4000), clock.now)
        before = clock.now
        clock.step()
        assert 0.75 * target < clock.now - before <= target


@pytest.mark.parametrize(
    ("own", "least", "most"), [((0.6, 0.6), 0.4, 0.6), ((0.6, 0.001), 0.12, 0.2), ((0, 0.6), 0.12, 0.2)]
)
def test_requests_may_have_longer_targets_and_the_shortest_in_a_step_counts(
    own: tuple[float, float], least: float, most: float
) -> None:
    """Ignore a target shorter than the server's: all prompts would pay for it."""
    clock = Clock(make(targets=Targets(inter_token=0.2)))
    clock.scheduler.add(request("one", 700, inter_token=own[0]), 0.0)
    clock.scheduler.add(request("other", 64, inter_token=own[1]), 0.0)
    for _ in range(20):
        clock.step()
    clock.scheduler.add(request("long", 4000), clock.now)
    before = clock.now
    clock.step()
    assert least < clock.now - before <= most


def test_a_target_that_no_step_meets_still_lets_prompts_end() -> None:
    clock = Clock(make(targets=Targets(inter_token=0.001)))
    clock.warm(4)
    clock.scheduler.add(request("long", 700), clock.now)
    steps = 0
    while not any(chunk.id == "long" and chunk.ends == "sample" for chunk in clock.step().chunks):
        steps += 1
        assert steps < 300


def test_without_a_target_prompts_get_more_the_more_of_them_wait() -> None:
    found = []
    for waiting in (1, 8, 40):
        clock = Clock(make())
        clock.warm(8)
        for number in range(waiting):
            clock.scheduler.add(request(f"w{number}", 900, clock.now), clock.now)
        found.append(prompt_tokens(clock.step()))
    assert 32 < found[0] < found[1] < found[2]


@pytest.mark.parametrize("seconds", [0.01, 0.3, 4.0, 100.0])
@pytest.mark.parametrize("waiting", [1, 3, 30])
@pytest.mark.parametrize("rows", [1, 8, 60])
@pytest.mark.parametrize("plain", [0.01, 0.2])
def test_the_balance_is_the_least_sum_of_waits_and_gaps(plain: float, rows: int, waiting: int, seconds: float) -> None:
    """Balance as the module's docstring has it; no part of a step from 1 ms to 1,000 s has a smaller sum."""

    def costs(part: float) -> float:
        step = plain + part
        last = seconds / part * step
        waits = waiting * (3 * last + max(step, last / waiting)) / 4
        return waits + seconds / part * rows * step**2 / _GAP

    best = costs(_balance(plain, rows, waiting, seconds))
    assert all(best <= costs(10 ** (place / 100)) * (1 + 1e-9) for place in range(-300, 300))


def test_where_nobody_decodes_a_step_ends_with_a_prompt() -> None:
    """Compute several short prompts in a step, until reading the weights is a small part; one long one, alone."""
    clock = Clock(make())
    clock.warm(1)
    while clock.scheduler.has_work():
        clock.step()
    for number in range(20):
        clock.scheduler.add(request(f"short{number}", 50, clock.now), clock.now)
    counts = [chunk.count for chunk in clock.step().chunks]
    assert set(counts) == {50}
    assert 1 < len(counts) < 20
    clock = Clock(make())
    for number in range(3):
        clock.scheduler.add(request(f"long{number}", 900), 0.0)
    assert [chunk.count for chunk in clock.step().chunks] == [900]


def test_prompts_that_nobody_decodes_after_get_longer_steps() -> None:
    """Compute prompts with one output token each sooner, and give each its token sooner on average."""
    ends = {}
    for tokens in (1, 2):
        clock = Clock(make())
        clock.warm(1)
        while clock.scheduler.has_work():
            clock.step()
        begun, ends[tokens] = clock.now, []
        for number in range(20):
            clock.scheduler.add(request(f"short{number}", 200, clock.now, tokens=tokens), clock.now)
        while len(ends[tokens]) < 20 and (tokens == 1 or not ends[tokens]):
            sampled = sum(chunk.ends == "sample" for chunk in clock.step().chunks)
            ends[tokens] += [clock.now - begun] * sampled
    assert ends[1].count(ends[1][0]) > ends[2].count(ends[2][0])
    one_by_one = [number * exact(SLOW, Work(1.0, 1.0, 200, 200 * 100)) for number in range(1, 21)]
    assert ends[1][-1] < 0.95 * one_by_one[-1]
    assert sum(ends[1]) < sum(one_by_one)


def test_a_long_prompt_alone_leaves_room_for_those_that_come() -> None:
    """Spend a small part of the prompt's time on this room, and on the chat's steps."""
    clock = Clock(make(max_num_batched_tokens=8192))
    clock.warm(1)
    while clock.scheduler.has_work():
        clock.step()
    begun = clock.now
    clock.scheduler.add(request("long", 8000, begun), begun)
    clock.step()
    assert 0.5 < clock.now - begun < 3.0
    clock.scheduler.add(request("chat", 100, clock.now), clock.now)
    assert [chunk.id for chunk in clock.step().chunks][0] == "chat"
    while not any(chunk.id == "long" and chunk.ends == "sample" for chunk in clock.step().chunks):
        pass
    assert clock.now - begun < 1.1 * exact(SLOW, Work(1.0, 1.0, 8000, 8000 * 4000))


def test_first_tokens_get_the_speed_that_their_target_needs() -> None:
    sizes = []
    for target in (60.0, 2.2, 1.8):
        clock = Clock(make())
        clock.warm(8)
        clock.scheduler.add(request("urgent", 1000, clock.now, first_token=target), clock.now)
        sizes.append(prompt_tokens(clock.step()))
        begun = clock.now
        while not any(chunk.id == "urgent" and chunk.ends == "sample" for chunk in clock.step().chunks):
            pass
        if target < 60:
            assert clock.now - begun < target
    assert sizes[0] < sizes[1] < sizes[2]


def test_who_cannot_be_in_time_is_passed_by_who_can_but_not_for_ever() -> None:
    clock = Clock(make(max_num_seqs=5, targets=Targets(first_token=3.0)))
    clock.warm(3)
    clock.scheduler.add(request("late", 900, clock.now - 2.9), clock.now)
    clock.scheduler.add(request("in time", 300, clock.now), clock.now)
    assert _admitted(clock) == ["in time", "late"]
    clock = Clock(make(max_num_seqs=5, targets=Targets(first_token=3.0)))
    clock.warm(3)
    clock.scheduler.add(request("late for long", 900, clock.now - 12.1), clock.now)
    clock.scheduler.add(request("in time", 300, clock.now), clock.now)
    assert _admitted(clock) == ["late for long", "in time"]


def _passable(**more: Any) -> Clock:
    """Return a clock with requests that decode, and a long prompt in progress."""
    clock = Clock(make(**more))
    clock.warm(12)
    clock.scheduler.add(request("long", 4000, clock.now), clock.now)
    clock.step()
    return clock


def test_short_prompts_pass_a_long_one_in_progress_but_not_for_ever() -> None:
    clock = Clock(make())
    clock.warm(4)
    begun = clock.now
    clock.scheduler.add(request("long", 4000, begun), begun)
    clock.step()
    passed, parts = [], {"long": None}
    while (part := parts.get("long")) is None or part.ends != "sample":
        clock.scheduler.add(request(f"short {len(passed)}", 500, clock.now), clock.now)
        parts = {chunk.id: chunk for chunk in clock.step().chunks}
        passed.append(f"short {len(passed)}" in parts)
    took = exact(SLOW, Work(0.0, 0.0, 4000, 4000 * 2000))
    assert passed[0]
    assert not passed[-1]
    assert took < clock.now - begun < 4 * took


def test_who_passes_may_need_several_steps_in_which_the_long_prompt_waits() -> None:
    clock = _passable()
    clock.scheduler.add(request("short", 800, clock.now), clock.now)
    clock.scheduler.add(request("next", 800, clock.now), clock.now)
    pieces = [[(chunk.id, chunk.count) for chunk in clock.step().chunks if chunk.count > 1] for _ in range(4)]
    assert pieces[0] == [("short", 400)]
    assert pieces[1][0] == ("short", 400)
    assert pieces[2][0][0] == pieces[3][0][0] == "next"
    clock.scheduler.add(request("tiny", 20, clock.now), clock.now)
    assert {chunk.id for chunk in clock.step().chunks if chunk.count > 1} == {"tiny", "long"}


def test_a_step_computes_one_prompt_in_part_also_where_its_piece_is_short() -> None:
    clock = _passable(long_prefill_token_threshold=64)
    clock.scheduler.add(request("short", 150, clock.now), clock.now)
    pieces = [[(chunk.id, chunk.count) for chunk in clock.step().chunks if chunk.count > 1] for _ in range(3)]
    assert pieces == [[("short", 64)], [("short", 64)], [("short", 22), ("long", 64)]]


def test_who_passes_is_passed_by_who_is_short_beside_it_and_fits_in_a_step() -> None:
    clock = Clock(make())
    clock.warm(12)
    for id, size in (("long", 6000), ("short", 1200), ("tiny", 100)):
        clock.scheduler.add(request(id, size, clock.now), clock.now)
        plan = clock.step()
        assert [chunk.id for chunk in plan.chunks if chunk.count > 1][0] == id
    assert [chunk.id for chunk in clock.step().chunks if chunk.count > 1][0] == "short"


def _chat(clock: Clock, tokens: int) -> EngineRequest:
    """Return the next turn, of 40 tokens more, of a chat of which `tokens` are cached."""
    clock.scheduler.add(request("turn", tokens, clock.now), clock.now)
    while not any(chunk.id == "turn" and chunk.ends == "sample" for chunk in clock.step().chunks):
        pass
    again = request("turn", tokens + 40, clock.now)  # with the salt of the turn before: they share a cache
    return msgspec.structs.replace(again, id="again")


def test_what_is_cached_does_not_make_a_prompt_long() -> None:
    clock = Clock(make())
    clock.warm(4)
    again = _chat(clock, 1500)
    clock.scheduler.add(request("long", 4000, clock.now), clock.now)
    clock.step()
    clock.scheduler.add(again, clock.now)
    plan = clock.step()
    assert [chunk.id for chunk in plan.chunks if chunk.count > 1][0] == "again"
    assert next(chunk for chunk in plan.chunks if chunk.id == "again").ends == "sample"


def test_what_was_cached_and_is_gone_makes_a_prompt_long_again() -> None:
    clock = _passable()
    clock.scheduler.add(request("turn", 1500, clock.now), clock.now)
    clock.scheduler.waiting.head().found = 1400  # when it was asked
    plans = [clock.step() for _ in range(2)]
    assert [[chunk.id for chunk in plan.chunks if chunk.count > 1] for plan in plans] == [["long"], ["long"]]


def test_what_is_cached_does_not_make_a_prompt_late() -> None:
    """Admit 1,500 cached tokens, which would take longer than the target to compute."""
    clock = Clock(make(max_num_seqs=8, targets=Targets(first_token=1.0)))
    clock.warm(4)
    again = _chat(clock, 1500)
    clock.scheduler.add(again, clock.now)
    clock.scheduler.add(request("fresh", 300, clock.now), clock.now)
    assert _admitted(clock) == ["again", "fresh"]


def test_a_long_prompt_that_is_cached_is_not_passed_for_the_time_of_all_of_it() -> None:
    clock = Clock(make())
    clock.warm(4)
    again = msgspec.structs.replace(_chat(clock, 4000), prompt_ids=(1,) * 5500)
    clock.scheduler.add(again, clock.now)
    begun, number = clock.now, 0
    while not any(chunk.id == "again" and chunk.ends == "sample" for chunk in clock.step().chunks):
        for _ in range(6):
            number += 1
            clock.scheduler.add(request(f"short {number}", 100, clock.now), clock.now)
    assert clock.now - begun < 4 * exact(SLOW, Work(0.0, 0.0, 1500, 1500 * 4750))


@pytest.mark.parametrize(("size", "passes"), [(300, True), (500, False)])
def test_who_passes_leaves_the_blocks_that_the_long_prompt_will_need(size: int, passes: bool) -> None:
    clock = Clock(make(num_blocks=280, max_num_batched_tokens=1000))
    clock.scheduler.add(request("long", 4000, clock.now), clock.now)
    clock.step()
    clock.scheduler.add(request("short", size, clock.now), clock.now)
    assert [chunk.id for chunk in clock.step().chunks][0] == ("short" if passes else "long")


def test_who_is_less_urgent_does_not_pass() -> None:
    for priority, first in ((1, "long"), (0, "short"), (-1, "short")):
        clock = Clock(make())
        clock.warm(4)
        clock.scheduler.add(request("long", 4000, clock.now), clock.now)
        clock.step()
        short = msgspec.structs.replace(request("short", 100, clock.now), priority=priority)
        clock.scheduler.add(short, clock.now)
        assert next(chunk.id for chunk in clock.step().chunks if chunk.count > 1) == first


@pytest.mark.parametrize("device", [replace(SLOW, any=0.0), replace(SLOW, any=1e-6, row=0.0)])
def test_a_step_that_seems_to_cost_nothing_does_not_cut_prompts_to_pieces(device: Device) -> None:
    clock = Clock(make(), device)
    clock.warm(1)
    while clock.scheduler.has_work():
        clock.step()
    clock.scheduler.add(request("long", 3000, clock.now), clock.now)
    counts = [chunk.count for _ in range(4) for chunk in clock.step().chunks if chunk.count > 1]
    assert min(counts) >= 256


def test_no_prompt_that_waits_is_passed() -> None:
    clock = Clock(make())
    clock.warm(4)
    for number, size in enumerate((4000, 500, 2000, 100)):
        clock.scheduler.add(request(f"{number}", size, clock.now), clock.now)
    clock.step()
    plan = clock.step()
    assert [chunk.id for chunk in plan.chunks if chunk.count > 1][0] == "1"
    assert {chunk.id for chunk in plan.chunks if chunk.count > 1} <= {"0", "1"}
    assert clock.step().admits == ()


@pytest.mark.parametrize("options", [{"prompt_share": 0}, {"max_num_partial_prefills": 2}])
def test_nobody_passes_without_a_pace_or_where_prompts_share_a_step(options: dict[str, int]) -> None:
    clock = _passable(max_num_batched_tokens=256, **options)
    clock.scheduler.add(request("short", 100, clock.now), clock.now)
    plan = clock.step()
    assert next(chunk.id for chunk in plan.chunks if chunk.count > 1) == "long"


def _admitted(clock: Clock) -> list[str]:
    found: list[str] = []
    while len(found) < 2:
        found += [admit.id for admit in clock.step().admits]
    return found


def test_a_platform_that_asks_for_no_pace_gives_prompts_the_whole_step_unless_the_server_has_a_target() -> None:
    for targets, least, most in ((Targets(), 2048 - 9, 2048 - 9), (Targets(inter_token=0.2), 50, 200)):
        clock = Clock(make(prompt_share=0, targets=targets))
        clock.warm(8)
        clock.scheduler.add(request("long", 4000, clock.now, inter_token=0.001), clock.now)
        assert least <= prompt_tokens(clock.step()) <= most


def test_the_longest_piece_of_a_prompt_holds_beside_targets() -> None:
    clock = Clock(make(long_prefill_token_threshold=40, targets=Targets(inter_token=0.6)))
    clock.warm(2)
    clock.scheduler.add(request("long", 900, clock.now), clock.now)
    assert prompt_tokens(clock.step()) == 40
