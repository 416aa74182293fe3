"""`Loads`: whether guesses pay with so many requests in a step, learnt from the steps that ran.

A guess costs the computation of one more token, which is almost nothing beside the weights that a step of few rows
reads, and as much as any token where rows are many. A step of R rows yields more tokens in the same time with another
guess if that is right with a chance above

    bar = (seconds that a guess adds) x (tokens per second without it).

The seconds are learnt by least squares through the origin, from how much longer steps with guesses take than plain
ones. The sum is checked: steps with guesses are compared with as many tokens of plain steps. If they took longer,
plain steps follow, so many that the loss is less than a fortieth of their time. Plain steps are measured again from
time to time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_PLAIN = 4  # plain steps that are measured before and between guesses
_KNOWN = 9  # plain steps whose median counts
_TRIAL = 16  # steps with guesses after which they are compared with plain ones
_LOSS = 3.0  # plain steps: a loss that ends a trial at once
_LONG_RUN = 256  # steps with guesses, after which plain ones are measured again
_PATIENCE = 40.0  # plain steps for one that was lost
_LEAST_REST, _LONGEST_REST = 16, 512
_ROWS = 32  # tokens that take as long as the weights: a first guess
_SURE = 64.0  # squared guesses: how much that first guess weighs
_KEPT = 0.9  # of what is known, with each new step
_OUTLIER = 3.0  # times what is expected: a step that took longer has waited for something else
NEVER = 2.0  # no chance is above


@dataclass(slots=True)
class Load:
    """Steps with about the same number of rows."""

    known: deque[float] = field(default_factory=lambda: deque(maxlen=_KNOWN))  # seconds of the last plain steps
    seconds: float = 0.0  # of a plain step
    tokens: float = 0.0  # of the last steps with guesses, for each row
    time: float = 0.0  # seconds of these
    steps: int = 0  # with guesses, since plain ones were measured
    rest: int = _PLAIN  # plain steps to come
    products: float = 0.0  # guesses x seconds that they added, of the last steps
    squares: float = 0.0  # guesses x guesses

    @property
    def each(self) -> float:
        """Seconds that a guess adds to a step."""
        expected = self.seconds / _ROWS
        return max(0.0, self.products + _SURE * expected) / (self.squares + _SURE)

    def see_plain(self, seconds: float) -> None:
        self.known.append(seconds)
        self.seconds = median(self.known)
        self.rest = max(0, self.rest - 1)

    def see_guesses(self, guesses: int, per_row: float, seconds: float) -> None:
        """Learn from a step with guesses, of which each row got `per_row` tokens; and judge, when it is time."""
        seconds = min(seconds, _OUTLIER * per_row * self.seconds + guesses * self.each)
        self.products = _KEPT * self.products + guesses * (seconds - self.seconds)
        self.squares = _KEPT * self.squares + guesses**2
        self.tokens += per_row
        self.time += seconds
        self.steps += 1
        lost = self.time / self.seconds - self.tokens  # plain steps
        if lost > _LOSS or (lost > 0 and self.steps % _TRIAL == 0):
            self._pause(min(_LONGEST_REST, max(_LEAST_REST, int(_PATIENCE * lost))))
        elif self.steps >= _LONG_RUN:
            self._pause(_PLAIN)
        elif self.steps % _TRIAL == 0:
            self.tokens = self.time = 0.0

    def _pause(self, steps: int) -> None:
        self.rest = steps
        self.steps = 0
        self.tokens = self.time = 0.0


class Loads:
    """Records of steps, by the number of their rows."""

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}

    def bar(self, rows: int) -> float:
        """Return the chance that a guess must have in a step of so many rows."""
        load = self._of(rows)
        if load.rest:
            return NEVER
        rate = load.tokens / load.time if load.time else 0.0
        return load.each * rows * max(rate, 1 / load.seconds if load.seconds else 0.0)

    def observe(self, rows: int, guessing: bool, guesses: int, tokens: int, seconds: float) -> None:
        """Learn from a step of `rows` that decoded and yielded `tokens`. `guessing`: it had guesses, or made some."""
        load = self._of(rows)
        if not guessing:
            load.see_plain(seconds)
        elif load.seconds:
            load.see_guesses(guesses, tokens / rows, seconds)

    def _of(self, rows: int) -> Load:
        return self._loads.setdefault(_bucket(rows), Load())


def _bucket(rows: int) -> int:
    """Return a number that is the same for numbers of rows that differ by less than a fourth."""
    shift = max(0, rows.bit_length() - 3)
    return (rows >> shift) << shift
