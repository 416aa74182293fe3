"""`fair`: API keys share the engine evenly; the key for which the least was computed comes first."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.interfaces.scheduler import RequestView, SchedulingPolicy


class FairPolicy(SchedulingPolicy):
    """A policy in which a key with many requests does not delay those of other keys by more than one of its own.

    Within a key, requests come by priority and then in order of admission. Requests without a key share one.
    """

    refresh_seconds = 0.5  # what was computed grows all the time
    by_key = True

    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        return (view.key_served, view.priority, view.sequence)

    def victim(self, running: Sequence[RequestView]) -> str:
        return max(running, key=lambda view: (view.key_served, view.priority, view.sequence)).id
