"""What `LLM.get_metrics` returns: the metrics of ``/metrics`` whose names begin with ``vllm:``, as objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "vllm:"
_POSITION = "position"  # label of a counter that is a vector


class Metric(Struct, frozen=True, kw_only=True):
    """One series: a name, as Prometheus shows it but for a counter's ``_total``, and its labels."""

    name: str
    labels: dict[str, str]


class Counter(Metric, frozen=True, kw_only=True):
    """A number that only grows."""

    value: int


class Gauge(Metric, frozen=True, kw_only=True):
    """A number that goes up and down."""

    value: float


class Vector(Metric, frozen=True, kw_only=True):
    """Counters that have a position, in its order."""

    values: list[int]


class Histogram(Metric, frozen=True, kw_only=True):
    """A histogram. `buckets`: upper bound, as text, "+Inf" last → how many values are at most so large."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(text: str) -> list[Metric]:
    """Read the series of a text in the format that Prometheus reads."""
    families = text_string_to_metric_families(text)
    return [metric for family in families if family.name.startswith(_PREFIX) for metric in _series(family)]


def _series(family: Any) -> Iterator[Metric]:
    if family.type == "gauge":
        for sample in family.samples:
            yield Gauge(name=family.name, labels=sample.labels, value=sample.value)
    elif family.type == "counter":
        groups = _grouped(family, _POSITION)
        for labels, samples in groups:
            if _POSITION in samples[0].labels:
                samples = sorted(samples, key=lambda sample: int(sample.labels[_POSITION]))
                yield Vector(name=family.name, labels=labels, values=[int(sample.value) for sample in samples])
            else:
                yield Counter(name=family.name, labels=labels, value=int(samples[0].value))
    elif family.type == "histogram":
        for labels, samples in _grouped(family, "le"):
            values = {sample.name.removeprefix(family.name): sample.value for sample in samples}
            buckets = {sample.labels["le"]: int(sample.value) for sample in samples if "le" in sample.labels}
            yield Histogram(
                name=family.name, labels=labels, count=int(values["_count"]), sum=values["_sum"], buckets=buckets
            )


def _grouped(family: Any, without: str) -> Iterator[tuple[dict[str, str], Sequence[Any]]]:
    """Group samples by their labels, except the label `without`."""
    groups: dict[tuple[tuple[str, str], ...], list[Any]] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != without}
        groups.setdefault(tuple(labels.items()), []).append(sample)
    return ((dict(labels), samples) for labels, samples in groups.items())
