"""How long users wait, by simulated time: nobody starves, gaps are bounded, and nothing is paid for it.

The rules that it is compared with are the constant that went before it (two tokens of prompts for each request that
decodes) and a whole step for prompts, as the peer's default.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from ferrule.engine.pace import Pace
from ferrule.engine.request import Request
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import CacheGroup, Targets
from ferrule_plugins.policy.fcfs import FcfsPolicy
from ferrule_testkit.timed import Client, Device, Waits, percentile, run

DEVICES = {
    "bf16": Device(),
    "tiles": Device(any=0.035, row=0.0008, prompt_token=0.0004, pair=4e-8),
    "int4": Device(any=0.013, row=0.0006, prompt_token=0.0006),
}


def _poisson(count: int, rate: float) -> tuple[float, ...]:
    rng, now, times = random.Random(2), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return tuple(times)


def _workload(name: str) -> list[Client]:
    rng = random.Random(1)
    return {
        "closed loop": [Client(128, rng.randint(64, 192), 4) for _ in range(32)],
        "four long prompts": [Client(1024, 128) for _ in range(4)],
        "arrivals": [Client(256, 128, 60, times=_poisson(60, 0.8))],
        "document among chats": [Client(128, 128, 6) for _ in range(8)] + [Client(3800, 32, 3, begin=5.0)],
    }[name]


WORKLOADS = ("closed loop", "four long prompts", "arrivals", "document among chats")


class _Constant(Pace):
    """Two tokens for each request that decodes, for 32 at least; all of a step for a burst."""

    def tokens(self, decoding: Sequence[Request], prompts: Sequence[Request], budget: int, now: float) -> int:
        if not decoding or (
            len(prompts) >= max(8, 4 * len(decoding)) and sum(each.todo for each in prompts) <= 2 * budget
        ):
            return budget
        return min(budget, 2 * max(32, len(decoding)))


def _scheduler(pace: type[Pace] | None = None, **more: Any) -> DefaultScheduler:
    limits = SchedulerLimits(
        groups=(CacheGroup("full", 16),),
        num_blocks=8000,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        **more,
    )
    scheduler = DefaultScheduler(limits, FcfsPolicy())
    if pace is not None:
        scheduler._prefills.pace = pace(limits)
    return scheduler


def _waits(workload: str, device: str, pace: type[Pace] | None = None, **more: Any) -> Waits:
    return run(_scheduler(pace, **more), _workload(workload), DEVICES[device])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_nothing_is_paid_for_it(workload: str, device: str) -> None:
    """All is done as soon as with the constant, first tokens come sooner on average, and no gap is the peer's."""
    ours, constant = _waits(workload, device, prompt_share=2), _waits(workload, device, _Constant, prompt_share=2)
    peer = _waits(workload, device)
    assert ours.total < 1.02 * constant.total
    assert _mean(ours.firsts) < _mean(constant.firsts)
    assert _mean(ours.firsts) < 1.2 * _mean(peer.firsts)
    assert max(ours.gaps) <= 1.02 * max(peer.gaps)


@pytest.mark.parametrize("target", [0.15, 0.3, 0.8])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_gaps_keep_to_a_target(workload: str, device: str, target: float) -> None:
    """The first few steps excepted, which teach what steps cost."""
    waits = _waits(workload, device, prompt_share=2, targets=Targets(inter_token=target))
    assert percentile(waits.gaps, 99) <= target
    assert percentile(waits.gaps, 99.9) <= 1.3 * target


@pytest.mark.parametrize("workload", WORKLOADS)
def test_nobody_starves_with_a_target_that_no_step_meets(workload: str) -> None:
    waits = _waits(workload, "bf16", prompt_share=2, targets=Targets(inter_token=0.001))
    assert max(waits.firsts) < 12 * max(_waits(workload, "bf16", _Constant, prompt_share=2).firsts)


def test_more_first_tokens_are_in_time_where_not_all_can_be() -> None:
    """A third of a burst cannot be in time; those who wait in vain do not keep others waiting, and are served, too."""
    clients = [Client(600, 8, 40, times=tuple(0.45 * number for number in range(40)))]
    target = Targets(first_token=3.0)
    device = Device(any=0.04, row=0.001, prompt_token=0.001, pair=0.0)
    ours = run(_scheduler(prompt_share=2, targets=target), clients, device).firsts
    blind = run(_scheduler(_Constant, prompt_share=2), clients, device).firsts
    assert len(ours) == len(blind) == 40
    assert sum(each <= 3.0 for each in ours) > 1.3 * sum(each <= 3.0 for each in blind)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
