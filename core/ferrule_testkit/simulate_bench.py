"""How long the scheduler takes for one step. Wall-clock figures, for people; no test depends on them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ferrule.interfaces.scheduler import Scheduler, SchedulerLimits, SchedulingPolicy
from ferrule.types import CacheGroup, EngineRequest, RowResult, StepPlan, StepResult, TokenSampling

ROWS = 256
STEPS = 400


def bench(make: Callable[[SchedulerLimits, SchedulingPolicy], Scheduler], policy: SchedulingPolicy, depth: int) -> str:
    """Time schedule + commit with ROWS requests that decode."""
    groups = (CacheGroup("full", 16),)
    limits = SchedulerLimits(
        groups=groups,
        num_blocks=40_000,
        max_num_seqs=ROWS,
        max_num_batched_tokens=8192,
        max_model_len=16_384,
        depth=depth,
    )
    scheduler = make(limits, policy)
    for i in range(ROWS):
        sampling = TokenSampling(seed=i, max_tokens=STEPS + 100, stop_token_ids=(2,))
        scheduler.add(EngineRequest(id=f"{i:032x}", prompt_ids=(i + 10, *range(100, 131)), sampling=sampling), 0.0)
    in_flight: deque[tuple[StepPlan, StepResult]] = deque()
    seconds = []
    for _ in range(STEPS):
        first = time.perf_counter()
        plan = scheduler.schedule(0.0)
        spent = time.perf_counter() - first
        if plan is not None:
            rows = tuple(RowResult(c.id, c.epoch, (7,) if c.samples else ()) for c in plan.chunks)
            in_flight.append((plan, StepResult(plan.step, rows)))
        if len(in_flight) >= depth:
            plan, result = in_flight.popleft()
            first = time.perf_counter()
            scheduler.commit(plan, result, 0.0)
            seconds.append(spent + time.perf_counter() - first)
    seconds = sorted(seconds[20:])
    middle, high = seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)]
    return f"{ROWS} rows, depth {depth}: {middle * 1e3:.3f} ms a step (p99 {high * 1e3:.3f}), {1 / middle:.0f} steps/s"
