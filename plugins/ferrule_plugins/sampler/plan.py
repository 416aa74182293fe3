"""A plan of what a batch's parameters ask for, on the host: made once while they stay the same, sent in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ferrule.interfaces.platform import Transfers
from ferrule.interfaces.sampler import Draws, Penalised, SampleRow
from ferrule.types import TokenSampling
from ferrule_plugins.sampler import noise

_AHEAD = 16  # positions whose noise is made at once

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Ranked = Callable[[torch.Tensor], list[torch.Tensor]]  # from chosen tokens to what `logprobs.rank` makes
Sent = Callable[[], torch.Tensor]  # the tensor on the device, once its parcel is sent


class Parcel:
    """Arrays of the host that go to the device together."""

    def __init__(self) -> None:
        self._host: list[torch.Tensor] = []
        self._there: list[torch.Tensor] = []

    def put(self, array: np.ndarray[Any, Any]) -> Sent:
        """Add an array, which must not change afterwards.

        The result returns it on the device, once the parcel is sent.
        """
        place = len(self._host)
        self._host.append(torch.from_numpy(array))
        return lambda: self._there[place]

    def send(self, transfers: Transfers, device: torch.device) -> None:
        if self._host:
            self._there = transfers.stage(self._host, device)


class Plan:
    """The rows of a batch by what must be done for them. It holds for rows with equal parameters in the same order."""

    def __init__(self, samplings: Sequence[TokenSampling]) -> None:
        self.samplings = list(samplings)
        self.random = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
        self.asking = [row for row, sampling in enumerate(samplings) if sampling.logprobs is not None]
        self.edited = [row for row, sampling in enumerate(samplings) if _is_edited(sampling)]
        self.penalised = [row for row, sampling in enumerate(samplings) if _is_penalised(sampling)]
        drawn = [samplings[row] for row in self.random]
        self._filtered = any(sampling.top_k > 0 or sampling.top_p < 1 for sampling in drawn)
        self.asked = np.array(self.asking, dtype=np.int64)
        self.shapes = np.array([_shape(samplings[row]) for row in self.asking], dtype=np.float64)
        self._seeds = noise.keys([sampling.seed for sampling in drawn])
        self._noise: list[list[float]] = []  # [draws][_AHEAD], by how far from these positions:
        self._begin: list[int] = []
        self._draws = np.array(
            [(r, s.top_k, 0.0, s.top_p, s.temperature, s.min_p) for r, s in zip(self.random, drawn, strict=True)]
        )
        self._penalties = np.array(
            [
                (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
                for s in (samplings[row] for row in self.penalised)
            ]
        )

    @property
    def drawn_shapes(self) -> Numbers:
        """The shapes of rows that are not greedy: see `draw.processed`."""
        return np.array([_shape(self.samplings[row]) for row in self.random], dtype=np.float64)

    def draws(self, rows: Sequence[SampleRow], parcel: Parcel) -> Draws | None:
        if not self.random:
            return None
        table = self._draws.copy()
        table[:, 2] = self._numbers([noise.place(rows[row].position, rows[row].draw) for row in self.random])
        return Draws(table, self._filtered, parcel.put(table))

    def _numbers(self, positions: list[int]) -> list[float]:
        """Return noise [draws] at these positions, which grow by one from step to step."""
        steps = [position - begin for position, begin in zip(positions, self._begin, strict=False)]
        if not steps or min(steps) < 0 or max(steps) >= _AHEAD:
            ahead = np.array(positions)[:, None] + np.arange(_AHEAD)
            self._begin, steps = positions, [0] * len(positions)
            self._noise = noise.numbers(self._seeds[:, None], ahead).tolist()
        return [numbers[step] for numbers, step in zip(self._noise, steps, strict=True)]

    def penalties(self, rows: Sequence[SampleRow], parcel: Parcel) -> Penalised | None:
        if not self.penalised:
            return None
        places = [
            (row, r.slot, r.num_embedded, r.num_prompt, r.position) for row in self.penalised for r in [rows[row]]
        ]
        table = np.concatenate([np.array(places, dtype=np.float64), self._penalties], axis=1)
        return Penalised(table, int((table[:, 4] - table[:, 2]).max()), parcel.put(table))


def _shape(sampling: TokenSampling) -> tuple[float, float, float, float]:
    """Return top_k (0: all), top_p, temperature and min_p; those of a greedy row change nothing."""
    return (0, 1, 1, 0) if sampling.greedy else (sampling.top_k, sampling.top_p, sampling.temperature, sampling.min_p)


def _is_penalised(sampling: TokenSampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


def _is_edited(sampling: TokenSampling) -> bool:
    """Return whether tokens are banned or biased, or a processor may change logits."""
    return bool(
        sampling.allowed_token_ids
        or sampling.bad_words
        or sampling.min_tokens
        or sampling.logit_bias
        or sampling.processors
    )
