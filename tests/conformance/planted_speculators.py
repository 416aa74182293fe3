"""Speculators with one fault each, for the test that the kit finds it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferrule.interfaces.speculator import DraftSteps, KnownRows, SpeculatorContext
from ferrule.types import Admit
from ferrule_plugins.speculator.ngram import Ngram
from ferrule_plugins.speculator.suffix import Suffix


class WritesToTheHistory(Ngram):
    """A speculator that uses texts as room for its own work."""

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        found = super().propose(rows, steps)
        rows.history[list(rows.slots), rows.lengths - 1] = 7
        return found


class BeyondTheVocabulary(Ngram):
    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        return super().propose(rows, steps) + 1000


class FloatsForIds(Ngram):
    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        return super().propose(rows, steps).float()


class SaysNothing(Ngram):
    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        return torch.full((len(rows.slots), 1), -1)


class OneScopeForAll(Suffix):
    def admit(self, admits: Sequence[Admit]) -> None:
        super().admit(admits)
        self._scopes[:] = 0


class TakesAnything(Ngram):
    def __init__(self, context: SpeculatorContext) -> None:
        object.__setattr__(context, "settings", {})
        super().__init__(context)


class PassesForEachToken(Ngram):
    """A speculator whose passes are as many as the tokens of a text."""

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        for _ in range(int(rows.lengths.max())):
            _ = steps.context
        return super().propose(rows, steps)
