"""`priority_ageing`: as `priority`, but a wait of AGE_SECONDS makes up for one level of priority."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.interfaces.scheduler import RequestView, SchedulingPolicy

AGE_SECONDS = 60.0  # a request that arrived this much earlier comes before one whose priority is better by 1


class PriorityAgeingPolicy(SchedulingPolicy):
    """An order by arrival + AGE_SECONDS x priority.

    Two requests grow older at the same rate, so this order never changes. A request waits behind later ones only for
    AGE_SECONDS for each level between them.
    """

    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        return (view.arrival + AGE_SECONDS * view.priority, view.sequence)

    def victim(self, running: Sequence[RequestView]) -> str:
        return max(running, key=lambda view: self.key(view, 0.0)).id
