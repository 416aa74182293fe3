"""Noise without state: one uniform number as a function of (seed, position, draw)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_DRAW = 1 << 40  # more than there are positions

Words = np.ndarray[Any, np.dtype[np.uint64]]


def _mix(x: Words) -> Words:
    """Apply SplitMix64's finaliser (Steele, Lea and Flood 2014): each input bit flips half of the output's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(seeds: Sequence[int]) -> Words:
    """Return the keys that `numbers` takes, for seeds of any size."""
    with np.errstate(over="ignore"):
        return _mix(np.array([seed & _WORD for seed in seeds], dtype=np.uint64) + np.uint64(_GOLDEN))


def place(position: int, draw: int) -> int:
    """Return the position that `numbers` takes for the draw number `draw`, from 0, at `position`."""
    return position + _DRAW * draw


def numbers(keys: Words, positions: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a number in [0, 1) with 53 bits for each pair of key and position, of arrays whose shapes fit."""
    with np.errstate(over="ignore"):
        steps = positions.astype(np.uint64) * np.uint64(_GOLDEN)
        words = _mix(_mix(keys ^ steps) + np.uint64(_GOLDEN))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a number in [0, 1) for each pair of seed and position; pairs that differ in either part are unrelated."""
    return numbers(keys(seeds), np.array(positions))
