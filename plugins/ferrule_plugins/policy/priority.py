"""`priority`: the lowest value first; among equals, first come, first served. Waiting makes up for priority."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.interfaces.scheduler import RequestView, SchedulingPolicy

AGE_SECONDS = 60.0  # a request that came this much earlier beats one of the next better priority


class PriorityPolicy(SchedulingPolicy):
    """Orders by arrival + AGE_SECONDS x priority.

    Two requests grow older at the same rate, so this is the order in which a wait of AGE_SECONDS is worth one level,
    and it never changes. A request waits behind later ones only for AGE_SECONDS for each level between them.
    """

    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        return (view.arrival + AGE_SECONDS * view.priority, view.sequence)

    def victim(self, running: Sequence[RequestView]) -> str:
        return max(running, key=lambda view: self.key(view, 0.0)).id
