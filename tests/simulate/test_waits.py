"""How long users wait, by simulated time: nobody starves, gaps are bounded, and nothing is paid for it.

The rules that it is compared with are the constant that went before it (two tokens of prompts for each request that
decodes) and a whole step for prompts, as the peer's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from ferrule.engine.pace import Pace
from ferrule.engine.request import Request
from ferrule.types import Targets
from tests.shared import grid
from tools.benchmarks.frontier import DEVICES, Constant, scheduler, workloads
from tools.benchmarks.timed import Client, Device, Waits, percentile, run

WORKLOADS = tuple(workloads())


@cache
def _waits(workload: str, device: str, pace: type[Pace] | None = None, **more: Any) -> Waits:
    return run(scheduler(pace, **more), workloads()[workload], DEVICES[device])


@grid({"workload": WORKLOADS, "device": list(DEVICES)})
def test_nothing_is_paid_for_it(workload: str, device: str) -> None:
    """End as soon as with the constant, with first tokens sooner on average, and no gap like the peer's."""
    ours, constant = _waits(workload, device, prompt_share=2), _waits(workload, device, Constant, prompt_share=2)
    peer = _waits(workload, device)
    assert ours.total < 1.02 * constant.total
    assert _mean(ours.firsts) < _mean(constant.firsts)
    assert _mean(ours.firsts) < 1.2 * _mean(peer.firsts)
    assert max(ours.gaps) <= 1.02 * max(peer.gaps)


class Impatient(Pace):
    """A pace under which no prompt is passed."""

    def patient(self, request: Request, now: float) -> bool:
        return False


@pytest.mark.parametrize("device", DEVICES)
def test_chats_wait_less_for_documents_that_are_passed(device: str) -> None:
    """Run clients that begin apart: chats that end together all wait for each other."""
    chats = [Client(128, 96 + 9 * number, 6, begin=0.7 * number) for number in range(8)]
    clients = [*chats, Client(3800, 32, 6, begin=5.0)]
    ours = run(scheduler(prompt_share=2), clients, DEVICES[device])
    other = run(scheduler(Impatient, prompt_share=2), clients, DEVICES[device])
    assert _mean(ours.first[128]) < 0.9 * _mean(other.first[128])
    assert max(ours.first[128]) < 0.5 * max(other.first[128])
    assert max(ours.first[3800]) < 1.2 * max(other.first[3800])
    assert ours.total < 1.05 * other.total


# A step of 32 rows alone takes the slowest device 0.4 s, and the narrow one 0.1 s: they cannot keep the least targets.
KEPT = [(device, target) for device in ("bf16", "tiles", "int4") for target in (0.15, 0.3, 0.8)] + [("narrow", 0.8)]


@grid({"device,target": KEPT, "workload": WORKLOADS})
def test_gaps_keep_to_a_target(workload: str, device: str, target: float) -> None:
    """Keep the target, the first few steps excepted, which teach what steps cost."""
    waits = _waits(workload, device, prompt_share=2, targets=Targets(inter_token=target))
    assert percentile(waits.gaps, 99) <= target
    assert percentile(waits.gaps, 99.9) <= 1.3 * target


OPTIONS: list[dict[str, int]] = [
    {"max_num_partial_prefills": 4},
    {"max_num_partial_prefills": 4, "max_long_partial_prefills": 1, "long_prefill_token_threshold": 512},
    {"long_prefill_token_threshold": 64},
]


@grid({"workload": WORKLOADS, "options": OPTIONS})
def test_a_target_goes_with_the_options_of_prefills(workload: str, options: dict[str, int]) -> None:
    """Share among several prompts at a time what the target leaves for them."""
    target = 0.3
    waits = _waits(workload, "bf16", prompt_share=2, targets=Targets(inter_token=target), **options)
    free = _waits(workload, "bf16", prompt_share=2, **options)
    assert percentile(waits.gaps, 99) <= target
    assert percentile(waits.gaps, 99.9) <= 1.3 * target
    assert len(waits.firsts) == len(free.firsts)
    assert waits.total < 1.5 * free.total


@pytest.mark.parametrize("workload", WORKLOADS)
def test_nobody_starves_with_a_target_that_no_step_meets(workload: str) -> None:
    waits = _waits(workload, "bf16", prompt_share=2, targets=Targets(inter_token=0.001))
    constant = _waits(workload, "bf16", Constant, prompt_share=2)
    assert len(waits.firsts) == len(constant.firsts)
    assert waits.total < 2 * constant.total


def test_more_first_tokens_are_in_time_where_not_all_can_be() -> None:
    """Serve a burst of which a third cannot be in time; those who wait in vain do not keep others waiting, and are
    served, too.
    """
    clients = [Client(600, 8, 40, times=tuple(0.45 * number for number in range(40)))]
    target = Targets(first_token=3.0)
    device = Device(any=0.04, row=0.001, prompt_token=0.001, pair=0.0)
    ours = run(scheduler(prompt_share=2, targets=target), clients, device).firsts
    blind = run(scheduler(Constant, prompt_share=2), clients, device).firsts
    assert len(ours) == len(blind) == 40
    assert sum(each <= 3.0 for each in ours) > 1.3 * sum(each <= 3.0 for each in blind)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
