"""`priority`: the lowest value always first; among equals, the one that arrived first."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.interfaces.scheduler import RequestView, SchedulingPolicy


class PriorityPolicy(SchedulingPolicy):
    """An order by priority, then arrival. Requests of a higher value wait for as long as lower ones keep coming;
    `priority_ageing` bounds that wait.
    """

    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        return (view.priority, view.arrival, view.sequence)

    def victim(self, running: Sequence[RequestView]) -> str:
        return max(running, key=lambda view: self.key(view, 0.0)).id
