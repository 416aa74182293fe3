"""Attention with linear biases (Press et al. 2021): a score falls with the distance to the key, in each head by its own
slope."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int, steepest: float = 8.0) -> tuple[float, ...]:
    """Return the slope of each head: 2^(-steepest i / n) for n heads, i from 1, where n is a power of two.

    For other numbers n is the power below, and the further heads have every second slope of twice as many.
    """
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-steepest * index / below) for index in range(1, below + 1)]
    between = [2.0 ** (-steepest * index / (2 * below)) for index in range(1, 2 * below + 1, 2)]
    return tuple((slopes + between)[:num_heads])
