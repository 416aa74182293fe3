"""Percentiles, reports and random prompts that all benchmarks share."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """Return a percentile by linear interpolation between order statistics; 0.0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(name: str, seconds: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> dict[str, float]:
    """Return mean, median and percentiles in milliseconds, under `name`."""
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    found = {f"mean_{name}_ms": round(mean * 1e3, 3), f"median_{name}_ms": round(percentile(seconds, 50) * 1e3, 3)}
    found.update({f"p{q:g}_{name}_ms": round(percentile(seconds, q) * 1e3, 3) for q in percentiles})
    return found


def report(title: str, figures: Mapping[str, Any], path: str | None, kept: Mapping[str, Any] | None = None) -> None:
    """Print a table of figures; when a path is given, write them there as JSON, or `kept` in their place."""
    print(f"\n{title}")
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"  {name:<{width}}  {value:,.3f}" if isinstance(value, float) else f"  {name:<{width}}  {value}")
    if path:
        Path(path).write_text(json.dumps(dict(kept or figures), indent=2) + "\n", encoding="utf-8")
        print(f"\nwritten to {path}")


def guess_figures(drafts: int, tokens: int, accepted: int) -> dict[str, float]:
    """Return what speculative decoding did: rows with guesses, guesses, and how many of them were right. Nothing where
    there were none.
    """
    if not tokens:
        return {}
    return {
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": round(100 * accepted / tokens, 2),
        "spec_decode_acceptance_length": round(1 + accepted / drafts, 3),
    }


def random_prompts(
    count: int, length: int, shared: int, ids: tuple[int, int], seed: int, spread: float = 0.0
) -> list[list[int]]:
    """Return prompts of token ids that share their first `shared` ids, drawn from the half-open range `ids`.

    Each prompt has `length` ids; with `spread`, the ids behind the shared ones are more or fewer by up to that
    fraction.
    """
    rng = random.Random(seed)
    prefix = [rng.randrange(*ids) for _ in range(min(shared, length))]
    rest = length - len(prefix)
    return [prefix + [rng.randrange(*ids) for _ in range(varied(rng, rest, spread))] for _ in range(count)]


def varied(rng: random.Random, length: int, spread: float) -> int:
    """Return a random length that differs from `length` by up to the fraction `spread`; at least 1 when `length` is."""
    low, high = int(length * (1 - spread)), int(length * (1 + spread))
    return max(min(length, 1), rng.randint(low, high)) if spread else length
