"""`fcfs`: first come, first served; the last to come is preempted first."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.interfaces.scheduler import RequestView, SchedulingPolicy


class FcfsPolicy(SchedulingPolicy):
    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        return (view.sequence,)

    def victim(self, running: Sequence[RequestView]) -> str:
        return max(running, key=lambda view: view.sequence).id
