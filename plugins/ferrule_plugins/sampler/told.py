"""The logprobs of rows that ask for them: of the logits as the model gave them, or as their tokens are drawn."""

from __future__ import annotations

import torch

from ferrule.interfaces.sampler import Chooser, LogprobsMode, Reading
from ferrule_plugins.sampler.draw import processed
from ferrule_plugins.sampler.plan import Parcel, Plan, Ranked


class Told:
    """The logprobs of one step.

    `see_raw` and `see_processed` are called before and after requests change their logits.
    """

    def __init__(self, choose: Chooser, plan: Plan, mode: LogprobsMode, parcel: Parcel) -> None:
        self._choose, self._mode = choose, mode
        self._tops = [plan.samplings[row].logprobs or 0 for row in plan.asking]
        self._all = len(plan.asking) == len(plan.samplings)
        self._rows, self._shapes = parcel.put(plan.asked), parcel.put(plan.shapes)
        self._ranked: Ranked | None = None
        self._logits: torch.Tensor | None = None  # [rows that ask, vocab]

    def see_raw(self, logits: torch.Tensor, kept: bool) -> None:
        """See the logits [all rows, vocab] before changes.

        With `kept`, nothing changes them before the end of the step.
        """
        if not self._mode.processed:
            rows = None if self._all else self._rows()
            self._ranked = self._choose.rank(logits, rows, self._tops, Reading(self._mode.normalised, kept))

    def see_processed(self, logits: torch.Tensor) -> None:
        if self._mode.processed:
            self._logits = logits.index_select(0, self._rows())

    def of(self, tokens: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the tensors of `logprobs.rank` for the logits seen and the chosen tokens [all rows], or None."""
        chosen = tokens if self._all else tokens.index_select(0, self._rows())
        if self._logits is not None:
            found = processed(self._logits, self._shapes(), chosen)
            self._ranked = self._choose.rank(found, None, self._tops, Reading(self._mode.normalised, kept=True))
        return None if self._ranked is None else self._ranked(chosen)
