"""Percentiles, reports and random prompts that all benchmarks share."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics; 0.0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds, under `name`."""
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    found = {f"mean_{name}_ms": round(mean * 1e3, 3)}
    found.update({f"p{q}_{name}_ms": round(percentile(seconds, q) * 1e3, 3) for q in PERCENTILES})
    return found


def report(title: str, figures: Mapping[str, Any], path: str | None) -> None:
    """Print a table, and write the figures as JSON when a path is given."""
    print(f"\n{title}")
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"  {name:<{width}}  {value:,.3f}" if isinstance(value, float) else f"  {name:<{width}}  {value}")
    if path:
        Path(path).write_text(json.dumps(dict(figures), indent=2) + "\n", encoding="utf-8")
        print(f"\nwritten to {path}")


def random_prompts(count: int, length: int, shared: int, ids: tuple[int, int], seed: int) -> list[list[int]]:
    """Token-id prompts of one length that share their first `shared` ids, drawn from the half-open range `ids`."""
    rng = random.Random(seed)
    prefix = [rng.randrange(*ids) for _ in range(min(shared, length))]
    return [prefix + [rng.randrange(*ids) for _ in range(length - len(prefix))] for _ in range(count)]
