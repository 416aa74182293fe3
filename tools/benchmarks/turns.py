"""Two things that are measured in turns, so that other work on the machine meets both alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Pairs(NamedTuple):
    """Measurements of the first thing and of the second, a pair for each round."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """The second's share of the first, from the least to the most."""
        return tuple(sorted(b / a for a, b in zip(self.first, self.second, strict=True)))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def __str__(self) -> str:
        first, second = statistics.median(self.first), statistics.median(self.second)
        return f"{first:.1f} | {second:.1f} | {self.ratio:.2f} ({self.ratios[0]:.2f} to {self.ratios[-1]:.2f})"


def in_turns(rounds: int, first: Callable[[int], float], second: Callable[[int], float]) -> Pairs:
    """Measure both `rounds` times, with the number of the round; -1 is a round before the first that does not count."""
    found: list[tuple[float, float]] = []
    for number in range(-1, rounds):
        if number % 2:
            b, a = second(number), first(number)
        else:
            a, b = first(number), second(number)
        found.append((a, b))
    return Pairs(*zip(*found[1:], strict=True))


def numbers(text: str) -> Sequence[int]:
    """Read an argument such as 1,32."""
    return [int(each) for each in text.split(",")]
