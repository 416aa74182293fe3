"""The host's work, counted: what a step does grows with what runs, and with nothing else."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest

from ferrule.engine import hashing
from ferrule.engine.cache import KVCacheManager
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.scheduler import RequestView, SchedulerLimits, SchedulingPolicy
from ferrule.types import CacheGroup, EngineRequest, FinishReason, RowResult, StepPlan, StepResult, TokenSampling
from ferrule_plugins.policy.fcfs import FcfsPolicy

SIZE = 16


class Counted(float):
    """A key that counts how often it is compared. Both directions are asked for by `bisect`."""

    comparisons = 0

    def __lt__(self, other: object) -> bool:
        Counted.comparisons += 1
        return float.__lt__(self, other)  # type: ignore[operator]

    __hash__ = float.__hash__


class Watched(FcfsPolicy):
    """A policy that counts the keys that are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = 0

    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        self.keys += 1
        return (Counted(-view.sequence),)  # the newest first: every place in the queue is found by comparing


def limits(running: int, blocks: int = 40_000) -> SchedulerLimits:
    return SchedulerLimits(
        groups=(CacheGroup("full", SIZE),),
        num_blocks=blocks,
        max_num_seqs=running,
        max_num_batched_tokens=8192,
        max_model_len=131_072,
        cache_root=b"root",
    )


def request(number: int, prompt: int = 8, max_tokens: int = 5000) -> EngineRequest:
    ids = (number, *range(prompt - 1))
    return EngineRequest(id=f"r{number}", prompt_ids=ids, work=TokenSampling(seed=number, max_tokens=max_tokens))


def step(scheduler: DefaultScheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    rows = tuple(
        RowResult(id=chunk.id, epoch=chunk.epoch, token_ids=(7,) if chunk.ends else ()) for chunk in plan.chunks
    )
    scheduler.commit(plan, StepResult(plan.step, rows), 0.0)
    return plan


def crowd(running: int, waiting: int, policy: SchedulingPolicy | None = None) -> DefaultScheduler:
    """Return a scheduler whose slots are all taken by requests that decode."""
    scheduler = DefaultScheduler(limits(running), policy or FcfsPolicy())
    for number in range(running):
        scheduler.add(request(number), 0.0)
    while len(scheduler.running) < running or any(one.todo > 1 for one in scheduler.running.values()):
        step(scheduler)
    for number in range(running, running + waiting):
        scheduler.add(request(number), 0.0)
    return scheduler


def work(function: Callable[[], Any]) -> int:
    """Count the calls, of Python and of C, that a function makes."""
    count = 0

    def see(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_step_does_not_see_who_waits() -> None:
    alone, crowded = crowd(32, 0), crowd(32, 3000)
    for _ in range(2 * SIZE):  # with steps in which blocks fill
        idle, busy = work(lambda: step(alone)), work(lambda: step(crowded))
        assert busy <= idle + 5


def test_a_step_does_the_same_for_each_that_runs() -> None:
    small, large = crowd(64, 100), crowd(512, 100)
    few = sum(work(lambda: step(small)) for _ in range(SIZE))
    many = sum(work(lambda: step(large)) for _ in range(SIZE))
    assert many <= 8 * few


def test_no_step_takes_keys_and_a_place_in_the_queue_is_found_by_halving() -> None:
    policy = Watched()
    scheduler = crowd(4, 4000, policy)
    policy.keys = Counted.comparisons = 0
    for _ in range(20):
        step(scheduler)
    assert (policy.keys, Counted.comparisons) == (0, 0)
    scheduler.add(request(9000), 0.0)
    assert policy.keys == 1
    assert Counted.comparisons <= 13  # the logarithm of 4,000, and one
    Counted.comparisons = 0
    scheduler.cancel(["r2000"], FinishReason.ABORT, 0.0)
    assert Counted.comparisons <= 13


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect the number of tokens in each block that was hashed."""
    seen: list[int] = []
    plain = hashing.HASHERS["sha256"]()

    def counting(parent: bytes, tokens: Sequence[int]) -> bytes:
        seen.append(len(tokens))
        return plain(parent, tokens)

    monkeypatch.setitem(hashing.HASHERS, "sha256", lambda: counting)
    return seen


def test_each_block_of_a_prompt_is_hashed_once_however_long_it_waits(hashed: list[int]) -> None:
    """Keep the digests of a prompt that waits for room in the cache, is computed in pieces, and is preempted."""
    scheduler = DefaultScheduler(limits(4, blocks=1000), FcfsPolicy())
    first, second = request(1, prompt=600 * SIZE, max_tokens=40), request(2, prompt=700 * SIZE, max_tokens=40)
    scheduler.add(first, 0.0)
    scheduler.add(second, 0.0)
    assert hashed == []  # nothing before its turn
    for _ in range(20):
        step(scheduler)
    assert [one.id for one in scheduler.running.values()] == ["r1"]
    assert len(hashed) <= 600 + 700 + 2
    scheduler.evacuate(0.0)
    while scheduler.has_work():
        step(scheduler)
    assert set(hashed) == {SIZE}
    assert len(hashed) <= 600 + 700 + 2 * 3  # and the blocks of their outputs


def test_a_prefix_is_looked_up_once_for_each_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = DefaultScheduler(limits(2), FcfsPolicy())
    for number in (1, 2):
        scheduler.add(request(1, prompt=500 * SIZE, max_tokens=1), 0.0)
        looks: deque[bytes] = deque()
        find = KVCacheManager._find

        def counting(self: KVCacheManager, group: int, digest: bytes, find: Any = find, looks: Any = looks) -> int:
            looks.append(digest)
            return int(find(self, group, digest))

        with monkeypatch.context() as patch:
            patch.setattr(KVCacheManager, "_find", counting)
            while scheduler.has_work():
                step(scheduler)
        # The second one finds all but the last block: looked for, then fetched.
        assert len(looks) <= (1 if number == 1 else 2 * 500)


def test_the_garbage_collector_passes_requests_by() -> None:
    """Keep requests from the collector: 10,000 waiting ones would stall a step for 30 ms, each time that it looks at
    their tokens.
    """
    scheduler = crowd(2, 1)
    plan = step(scheduler)
    waiting = scheduler.waiting.head()
    assert not any(map(gc.is_tracked, (plan, plan.chunks[0], waiting.spec, waiting.spec.work)))
    assert len(gc.get_referents(waiting.ids)) <= 1  # its type; a list would name each token
