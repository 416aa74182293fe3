"""`StepCosts`: how long a step will take, learnt from the steps that ran.

A step's time is taken to be linear: so much for any step (the weights are read), for each row, for each token of a
prompt, and for each pair of tokens of which one attends to the other. The four costs are those, none of them negative,
that explain the last steps best: least squares of errors in proportion to a step's time, older steps counting less
and less. A step that may have waited for something else counts only as far as Huber's rule lets it (P. J. Huber,
"Robust estimation of a location parameter", 1964). Costs that the steps say nothing of stay near a first guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ferrule.types import Chunk

_GUESS = 0.05  # seconds of any step, before one was measured
_DOUBT = 10.0  # times as much or nothing: how far a guess may be off
_NOISE = 0.1  # of a step's time: how far steps of the same work differ
_FAR = 3.0  # times the noise; an error beyond counts in proportion, not squared
_KEPT = 0.95  # of what is known of steps of a kind, with each new one of it
_SWEEPS = 60  # over the costs at most, which begin where they were
_CLOSE = 1e-3  # of a cost: what a last sweep may change


class Work(NamedTuple):
    """What a step does, as its costs see it."""

    any: float = 1.0
    rows: float = 0.0
    prompt_tokens: float = 0.0
    pairs: float = 0.0

    def __add__(self, other: tuple[float, ...]) -> Work:  # type: ignore[override]
        return Work(*(mine + its for mine, its in zip(self, other, strict=True)))


def work(chunks: Iterable[Chunk]) -> Work:
    """Of the rows of a step. Each token attends to those before it and to itself."""
    rows = tokens = pairs = 0
    for chunk in chunks:
        rows += 1
        tokens += chunk.count if chunk.count > 1 else 0
        pairs += chunk.count * (chunk.start + (chunk.count + 1) // 2)
    return Work(1.0, rows, tokens, pairs)


class StepCosts:
    """`cheap_tokens` is a first guess: so many tokens of prompts take as long as the weights."""

    def __init__(self, cheap_tokens: float) -> None:
        token = _GUESS / cheap_tokens
        self._guess = [_GUESS, token, token, token / 10_000]
        self._costs = list(self._guess)
        self._doubt = [(_DOUBT * cost) ** -2 for cost in self._guess]
        self._sums = [[0.0] * 14, [0.0] * 14]  # of steps without prompts, and with: neither drives out the other
        self._fitted = True

    def seconds(self, work: Sequence[float]) -> float:
        if not self._fitted:
            self._fit()
        return self._expected(work)

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step that took so long."""
        error = abs(seconds - self._expected(work))
        noise = _NOISE * max(seconds, self._expected(work))
        weight = min(1.0, _FAR * noise / (error or noise)) / noise**2
        any, rows, tokens, pairs = work
        terms = (
            (any * any, any * rows, any * tokens, any * pairs, rows * rows, rows * tokens, rows * pairs)
            + (tokens * tokens, tokens * pairs, pairs * pairs)
            + (any * seconds, rows * seconds, tokens * seconds, pairs * seconds)
        )
        kind = work.prompt_tokens > 0
        self._sums[kind] = [_KEPT * old + weight * new for old, new in zip(self._sums[kind], terms, strict=True)]
        self._fitted = False

    def _expected(self, work: Sequence[float]) -> float:
        return sum(cost * amount for cost, amount in zip(self._costs, work, strict=True))

    def _fit(self) -> None:
        """Coordinate descent: each cost in turn is what suits the others best, and not below 0."""
        aa, ar, at, ap, rr, rt, rp, tt, tp, pp, *values = (a + b for a, b in zip(*self._sums, strict=True))
        products = ((aa, ar, at, ap), (ar, rr, rt, rp), (at, rt, tt, tp), (ap, rp, tp, pp))
        costs = self._costs
        for _ in range(_SWEEPS):
            before = tuple(costs)
            for index, row in enumerate(products):
                others = sum(a * b for a, b in zip(row, costs, strict=True)) - row[index] * costs[index]
                doubt = self._doubt[index]
                costs[index] = max(0.0, (values[index] - others + doubt * self._guess[index]) / (row[index] + doubt))
            if all(abs(new - old) <= _CLOSE * old for new, old in zip(costs, before, strict=True)):
                break
        self._fitted = True
