"""`StepCosts`: how long a step will take, learnt from the steps that ran.

A step's time is taken to be linear: so much for any step (the weights are read), for each row, for each token of a
prompt, and for each pair of tokens of which one attends to the other. The four costs are followed by a Kalman filter,
since they drift: contexts change what caches hold, and other processes take the machine's time. See R. E. Kalman, "A
new approach to linear filtering and prediction problems" (1960); a measurement that is far off counts only as far as
Huber's rule lets it (P. J. Huber, "Robust estimation of a location parameter", 1964), for a step may have waited for
something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ferrule.types import Chunk

_GUESS = 0.05  # seconds of any step, before one was measured
_DOUBT = 10.0  # times as much or nothing: how far a guess may be off
_NOISE = 0.1  # of a step's time: how far steps of the same work differ
_DRIFT = 0.01  # of a cost: how far it moves from one step to the next
_FAR = 3.0  # standard deviations; what is farther off counts as this


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
        self._costs = [_GUESS, token, token, token / 10_000]
        self._covariance = [[0.0] * 4 for _ in range(4)]
        for index, cost in enumerate(self._costs):
            self._covariance[index][index] = (_DOUBT * cost) ** 2

    def seconds(self, work: Sequence[float]) -> float:
        return sum(cost * amount for cost, amount in zip(self._costs, work, strict=True))

    def observe(self, work: Sequence[float], seconds: float) -> None:
        """Learn from a step that took so long."""
        covariance = self._covariance
        for index, cost in enumerate(self._costs):
            if covariance[index][index] < (_DOUBT * cost) ** 2:
                covariance[index][index] += (_DRIFT * cost) ** 2
        gains = [sum(a * b for a, b in zip(row, work, strict=True)) for row in covariance]
        expected = self.seconds(work)
        variance = sum(a * b for a, b in zip(gains, work, strict=True)) + (_NOISE * max(seconds, expected)) ** 2
        far = _FAR * variance**0.5
        error = max(-far, min(seconds - expected, far))
        for index, gain in enumerate(gains):
            self._costs[index] = max(self._costs[index] + gain * error / variance, self._costs[index] / 2)
            for other in range(4):
                covariance[index][other] -= gain * gains[other] / variance
