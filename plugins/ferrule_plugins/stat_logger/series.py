"""Series that cost little to write: a histogram is a list of counters, found by bisection."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Histogram:
    """`names` lists every name under which it is shown: the current one and those of older dashboards."""

    def __init__(self, doc: str, bounds: Sequence[float], *names: str) -> None:
        self.names = names
        self._doc = doc
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def families(self, labels: dict[str, str]) -> list[HistogramMetricFamily]:
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        found = []
        for name in self.names:
            family = HistogramMetricFamily(name, self._doc, labels=list(labels))
            family.add_metric(list(labels.values()), buckets, self._sum)
            found.append(family)
        return found


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to `most`."""
    bounds: list[float] = []
    scale = 1
    while scale <= most:
        bounds += [step * scale for step in (1, 2, 5) if step * scale <= most]
        scale *= 10
    return tuple(bounds)
