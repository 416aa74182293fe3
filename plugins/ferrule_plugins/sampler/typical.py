"""Typical acceptance: a guess holds that is likely enough, whether or not it is what would have been drawn."""

from __future__ import annotations

import numpy as np
import torch

from ferrule.interfaces.sampler import TypicalAcceptance
from ferrule_plugins.sampler.draw import processed
from ferrule_plugins.sampler.plan import Parcel, Plan


class Typical:
    """The guesses of one step. `see` is called before tokens are drawn, which may overwrite logits.

    A guess holds if its probability is above the smaller of the threshold and alpha times exp(-entropy), so the surer
    the model is, the likelier a guess must be (T. Cai et al., "Medusa", 2024). Greedy rows are as sure as can be: for
    them nothing changes.
    """

    def __init__(self, bounds: TypicalAcceptance, plan: Plan, parcel: Parcel) -> None:
        self._bounds = bounds
        self._rows = parcel.put(np.array(plan.random, dtype=np.int64))
        self._shapes = parcel.put(plan.drawn_shapes)

    def see(self, logits: torch.Tensor) -> None:
        """See the logits [all rows, vocab] that tokens are drawn from."""
        self._logits = logits.index_select(0, self._rows())

    def accept(self, tokens: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
        """Return the drawn tokens [all rows] with the guesses that hold in their places. A guess of -1 is none."""
        rows, bounds = self._rows(), self._bounds
        drawn, guessed = tokens.index_select(0, rows), guesses.index_select(0, rows)
        chances = processed(self._logits, self._shapes(), drawn).softmax(-1)
        entropy = torch.special.entr(chances).sum(-1)
        least = (bounds.alpha * torch.exp(-entropy)).clamp(max=bounds.threshold)
        chance = chances.gather(1, guessed.clamp(min=0).unsqueeze(1)).squeeze(1)
        holds = (guessed >= 0) & (chance > least)
        return tokens.index_copy(0, rows, torch.where(holds, guessed, drawn))
