"""`Loads`: whether guesses pay with so many requests in a step, learnt from the steps that ran.

A guess costs the computation of one more token, which is almost nothing beside the weights that a step of few rows
reads, and as much as any token where rows are many. A step of R rows yields more tokens in the same time with another
guess if that is right with a chance above

    bar = (seconds that a guess adds) x (tokens per second without it).

The seconds are learnt from the last steps with guesses: by how much those with many took longer than those with few. If
all had the same number, they are at most what those steps took longer than plain ones, for each guess.
The sum is checked: steps with guesses are compared with as many tokens of plain steps. If they took longer, plain steps
follow, so many that the loss is less than a fortieth of their time. What guesses have saved before counts against a
loss: on a machine that does other work too, some steps in a row are slow at times, and the first steps of a size are
anyhow. Plain steps are measured again from time to time.
Steps that have prompts too count without the time that these are thought to take (`StepCosts`). All times are medians,
because on a busy machine any step may wait for something else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_PLAIN = 4  # plain steps that are measured before and between guesses
_KNOWN = 9  # steps of a kind whose median counts
_COMPARED = 32  # steps with guesses that are compared with each other
_AGAIN = 4  # steps with guesses after which the cost of one is learnt anew
_TRIAL = 16  # steps after which they are compared with plain ones
_LOSS, _SURE = 3.0, 6  # plain steps: a loss that ends a trial before that, after steps of which two may be odd
_CREDIT = 64.0  # plain steps: the most that guesses may lose again of what they have saved
_LONG_RUN = 256  # steps after which plain ones are measured again
_PATIENCE = 40.0  # plain steps for one that was lost
_LEAST_REST, _LONGEST_REST = 16, 512
_ROWS = 32  # tokens that take as long as the weights: a first guess
NEVER = 2.0  # no chance is above


@dataclass(slots=True)
class Load:
    """Steps with about the same number of rows. Those that only asked for guesses, and had none, are apart."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_KNOWN))  # seconds
    asked: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_KNOWN))  # 0 guesses, seconds
    guessed: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_COMPARED))  # guesses, seconds
    seconds: float = 0.0  # of a plain step
    each: float = 0.0  # seconds that a guess adds to a step
    learnt: bool = False  # `each` comes of steps with guesses
    rest: int = _PLAIN  # plain steps to come
    steps: int = 0  # since plain ones were measured
    tokens: float = 0.0  # of the steps of a trial, for each row
    made: list[int] = field(default_factory=list)  # guesses of each of these steps
    time: float = 0.0  # that these steps take, by medians
    saved: float = 0.0  # plain steps, in the trials before

    def see_plain(self, seconds: float) -> None:
        self.plain.append(seconds)
        self.seconds = _median(self.plain)
        self.each = self.each if self.learnt else self.seconds / _ROWS
        self.rest = max(0, self.rest - 1)

    def see_guesses(self, guesses: int, per_row: float, seconds: float) -> None:
        """Learn from a step with guesses, of which each row got `per_row` tokens; and judge, when it is time."""
        (self.guessed if guesses else self.asked).append((guesses, seconds))
        self.steps += 1
        if self.steps % _AGAIN == 0:
            self._learn()
        self.tokens += per_row
        self.made.append(guesses)
        self.time = self._typical()
        lost, trial = self.time / self.seconds - self.tokens - self.saved, self.steps % _TRIAL  # plain steps
        if (lost > _LOSS and self.steps >= _SURE) or (lost > 0 and trial == 0):
            self.learnt, self.saved = self.learnt and lost <= _LOSS, 0.0
            self._pause(min(_LONGEST_REST, max(_LEAST_REST, int(_PATIENCE * lost))))
        elif self.steps >= _LONG_RUN:
            self._pause(_PLAIN)
        elif trial == 0:
            self.saved = min(_CREDIT, -lost)
            self._begin()

    def _typical(self) -> float:
        """Return how long the steps of the trial take. They are judged by what is known now, also those before."""
        without, newest = self.made.count(0), list(self.guessed)[-_KNOWN:]
        asked = _median(seconds for _, seconds in self.asked)
        base = _median(seconds - self.each * count for count, seconds in newest)
        return without * asked + (len(self.made) - without) * base + self.each * sum(self.made)

    def _begin(self) -> None:
        """Begin another trial."""
        self.tokens = self.time = 0.0
        self.made.clear()

    def _learn(self) -> None:
        """Compare steps with many guesses with those with few, or with plain ones if all have about as many."""
        found = sorted(self.guessed)
        if len(found) < _AGAIN:
            return
        self.learnt = True
        few, many = found[: len(found) // 2], found[len(found) // 2 :]
        more = _mean(many) - _mean(few)
        if more < 1:
            longer = _median(took for _, took in found) - self.seconds
            self.each = min(self.each, max(0.0, longer) / _mean(found))
        elif len(found) >= 2 * _AGAIN:
            self.each = max(0.0, _median(took for _, took in many) - _median(took for _, took in few)) / more

    def _pause(self, steps: int) -> None:
        """Let plain steps follow. What comes then is compared anew: the last steps may have waited for something."""
        self.rest = steps
        self.guessed.clear()
        self.asked.clear()
        self.steps = 0
        self._begin()


class Loads:
    """Records of steps, by the number of their rows."""

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}

    def bar(self, rows: int) -> float:
        """Return the chance that a guess must have in a step of so many rows.

        It is at most 1 but in a rest: a few guesses are tried again, in case that the costs were not seen as they are.
        """
        load = self._of(rows)
        if load.rest:
            return NEVER
        rate = load.tokens / load.time if load.time else 0.0
        return min(1.0, load.each * rows * max(rate, 1 / load.seconds if load.seconds else 0.0))

    def observe(self, rows: int, guessing: bool, guesses: int, tokens: int, seconds: float) -> None:
        """Learn from a step of `rows` that decoded and yielded `tokens`. `guessing`: it had guesses, or made some."""
        load = self._of(rows)
        if not guessing:
            load.see_plain(seconds)
        elif load.seconds and not load.rest:  # what was in flight when a rest began belongs to no trial
            load.see_guesses(guesses, tokens / rows, seconds)

    def _of(self, rows: int) -> Load:
        return self._loads.setdefault(_bucket(rows), Load())


def _bucket(rows: int) -> int:
    """Return a number that is the same for numbers of rows that differ by less than a fourth."""
    shift = max(0, rows.bit_length() - 3)
    return (rows >> shift) << shift


def _median(values: Iterable[float]) -> float:
    """Return the median, or 0. The module `statistics` has one too, and brings a dozen of others."""
    found = sorted(values) or [0.0]
    return (found[len(found) // 2] + found[(len(found) - 1) // 2]) / 2


def _mean(found: Sequence[tuple[int, float]]) -> float:
    """Return the average number of guesses of some steps."""
    return sum(guesses for guesses, _ in found) / len(found)
