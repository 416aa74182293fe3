"""The built-in scheduler, with no more requests at once than the cache holds when all grow to their greatest length."""

from __future__ import annotations

from dataclasses import replace

from ferrule.interfaces.scheduler import SchedulerLimits, SchedulingPolicy
from ferrule_plugins.scheduler.default import DefaultScheduler


class ExampleScheduler(DefaultScheduler):
    def __init__(self, limits: SchedulerLimits, policy: SchedulingPolicy) -> None:
        super().__init__(replace(limits, max_num_seqs=min(limits.max_num_seqs, seats(limits))), policy)


def seats(limits: SchedulerLimits) -> int:
    """How many requests of the greatest length fit the cache together, and at least one. Block 0 belongs to nobody."""
    paged = [group for group in limits.groups if group.paged]
    needed = sum(-(-limits.max_model_len // group.block_size) for group in paged)
    return max(1, (limits.num_blocks - 1) // needed) if needed else limits.max_num_seqs
