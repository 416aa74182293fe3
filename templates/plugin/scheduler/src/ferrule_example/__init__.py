"""A scheduler before another one: only so many requests at once that the cache holds all of them at full length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ferrule.errors import PluginError
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.scheduler import Scheduler, SchedulerLimits, SchedulingPolicy
from ferrule.types import EngineRequest, EngineStats, FinishReason, RequestDelta, StepPlan, StepResult


class ExampleScheduler(Scheduler):
    """A scheduler that decides how many may run, and leaves who runs when to the default scheduler."""

    def __init__(self, limits: SchedulerLimits, policy: SchedulingPolicy, plugins: Plugins | None = None) -> None:
        if plugins is None:
            raise PluginError("The example scheduler needs the set of plugins: it stands before another scheduler.")
        limits = replace(limits, max_num_seqs=min(limits.max_num_seqs, seats(limits)))
        super().__init__(limits, policy, plugins)
        self._inner: Scheduler = plugins.make("scheduler", "default", limits, policy, plugins)

    def add(self, request: EngineRequest, now: float) -> None:
        self._inner.add(request, now)

    def cancel(self, ids: Sequence[str], reason: FinishReason, now: float) -> list[RequestDelta]:
        return self._inner.cancel(ids, reason, now)

    def schedule(self, now: float) -> StepPlan | None:
        return self._inner.schedule(now)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestDelta]:
        return self._inner.commit(plan, result, now)

    def has_work(self) -> bool:
        return self._inner.has_work()

    def stats(self) -> EngineStats:
        return self._inner.stats()

    def check(self) -> None:
        self._inner.check()

    def pause(self, id: str, paused: bool, now: float) -> None:
        self._inner.pause(id, paused, now)

    def reset_cache(self) -> bool:
        return self._inner.reset_cache()

    def evacuate(self, now: float) -> bool:
        return self._inner.evacuate(now)


def seats(limits: SchedulerLimits) -> int:
    """Return how many requests of the greatest length fit the cache together, and at least one. Block 0 belongs to
    nobody.
    """
    paged = [group for group in limits.groups if group.paged]
    needed = sum(-(-limits.max_model_len // group.block_size) for group in paged)
    return max(1, (limits.num_blocks - 1) // needed) if needed else limits.max_num_seqs
