"""`chaos`: random order, victims and budgets, for tests. Output must not depend on any of them."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from ferrule.interfaces.scheduler import RequestView, SchedulingPolicy


class ChaosPolicy(SchedulingPolicy):
    """A policy of random answers. Each is a hash of the question and of `seed`, so that a run can be repeated."""

    refresh_seconds = 0.0

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        return (self._draw(view.id, now),)

    def victim(self, running: Sequence[RequestView]) -> str:
        return min(running, key=lambda view: self._draw(view.id, view.num_computed)).id

    def budget(self, running: int, waiting: int, limit: int) -> int:
        return 1 + self._draw("budget", running, waiting) % limit

    def _draw(self, *values: object) -> int:
        return crc32(repr((self._seed, values)).encode())
