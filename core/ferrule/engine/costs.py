"""`StepCosts`: how long a step will take, learnt from the steps that ran.

A step's time is taken to be linear: so much for any step (the weights are read), for each row, for each token of a
prompt, and for each pair of tokens of which one attends to the other. The four costs are those, none of them negative,
that explain the last steps best: least squares of errors in proportion to a step's time, older steps counting less
and less. A step that may have waited for something else counts only as far as Huber's rule lets it (P. J. Huber,
"Robust estimation of a location parameter", 1964). Costs that the steps say nothing of stay near a first guess.

The scheduler has no clock: `schedule` and `commit` are told the time, so that all of this works in the simulator as
well. How much of a step prompts get was a constant before, which is right for one machine and one load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement, starmap
from operator import mul
from typing import NamedTuple

from ferrule.types import Chunk

_GUESS = 0.05  # seconds of any step, before one was measured
_PULL = 0.01  # towards the guesses: they may be off by ten times as much
_NOISE = 0.1  # of a step's time: how far steps of the same work differ
_FAR = 3.0  # times the noise; an error beyond counts in proportion, not squared
_SHORT = 1e-4  # seconds: no error is smaller
_KEPT = 0.95  # of what is known of steps of a kind, with each new one of it


class Work(NamedTuple):
    """Amounts of work in a step, for each of which `StepCosts` knows the cost."""

    any: float = 1.0
    rows: float = 0.0
    prompt_tokens: float = 0.0
    pairs: float = 0.0


def work(chunks: Iterable[Chunk]) -> Work:
    """Add up the work of a step's rows. Each token attends to itself and to those before it. Guesses are rows."""
    rows = tokens = pairs = 0
    for chunk in chunks:
        rows += 1 + chunk.drafts
        tokens += chunk.count if chunk.count > 1 + chunk.drafts else 0
        pairs += chunk.count * (chunk.start + (chunk.count + 1) // 2)
    return Work(1.0, rows, tokens, pairs)


class StepCosts:
    """`cheap_tokens` is a first guess: so many tokens of prompts take as long as the weights."""

    def __init__(self, cheap_tokens: float) -> None:
        token = _GUESS / cheap_tokens
        self._guess = [_GUESS, token, token, token / 10_000]
        self._costs = list(self._guess)
        self._sums = [[0.0] * 15, [0.0] * 15]  # of steps without prompts, and with: neither drives out the other
        self._fitted = True

    def seconds(self, work: Sequence[float]) -> float:
        if not self._fitted:
            self._fit()
        return self._expected(work)

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step that took so long."""
        error = abs(seconds - self._expected(work))
        noise = max(_NOISE * max(seconds, self._expected(work)), _SHORT)
        weight = min(1.0, _FAR * noise / (error or noise)) / noise**2
        terms = starmap(mul, combinations_with_replacement((*work, seconds), 2))
        kind = work.prompt_tokens > 0
        self._sums[kind] = [_KEPT * old + weight * new for old, new in zip(self._sums[kind], terms, strict=True)]
        self._fitted = False

    def _expected(self, work: Sequence[float]) -> float:
        return sum(cost * amount for cost, amount in zip(self._costs, work, strict=True))

    def _fit(self) -> None:
        """Fit the costs by least squares, in units of the guesses. Set the most negative one to 0, and repeat until
        none is.
        """
        aa, ar, at, ap, av, rr, rt, rp, rv, tt, tp, tv, pp, pv, _ = (a + b for a, b in zip(*self._sums, strict=True))
        products = ((aa, ar, at, ap), (ar, rr, rt, rp), (at, rt, tt, tp), (ap, rp, tp, pp))
        values = (av, rv, tv, pv)
        guess, free = self._guess, [0, 1, 2, 3]
        while True:
            rows = [[products[i][j] * guess[i] * guess[j] + (i == j) * _PULL for j in free] for i in free]
            found = _solve(rows, [values[i] * guess[i] + _PULL for i in free])
            if min(found) >= 0:  # so is the last one that is left: all amounts and times are
                break
            free.pop(found.index(min(found)))
        self._costs = [0.0] * 4
        for index, cost in zip(free, found, strict=True):
            self._costs[index] = cost * guess[index]
        self._fitted = True


def _solve(rows: list[list[float]], values: list[float]) -> list[float]:
    """Solve a symmetric system by elimination, which changes the arguments. No eigenvalue is below _PULL."""
    size = len(values)
    for pivot in range(size):
        rows[pivot][pivot] = max(rows[pivot][pivot], _PULL)  # it is, but for rounding
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            rows[below] = [mine - factor * its for mine, its in zip(rows[below], rows[pivot], strict=True)]
            values[below] -= factor * values[pivot]
    for row in reversed(range(size)):
        known = sum(rows[row][other] * values[other] for other in range(row + 1, size))
        values[row] = (values[row] - known) / rows[row][row]
    return values
