"""A speculator that knows how texts go on, and errs by chance: what guesses must not change is shown with it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator
from ferrule.types import Chunk


class LuckySpeculator(Speculator):
    """A speculator that guesses up to `most` tokens of the text among `texts` that a request's ids begin, each right
    with `chance`.
    """

    def __init__(self, vocab_size: int, most: int = 4, seed: int = 0) -> None:
        self.texts: list[list[int]] = []
        self.chance = 0.5
        self._vocab_size = vocab_size
        self._most = most
        self._draw = random.Random(seed)
        self.restart()

    def restart(self) -> None:
        """Reset the counts: another engine begins to use the runner."""
        self.rows = 0  # chunks that were computed
        self._seen: dict[tuple[int, int], int] = {}  # by slot and epoch: tokens whose hidden states were observed
        self._hidden: dict[int, dict[int, torch.Tensor]] = {}  # by slot: hidden states, by position

    def observe(self, chunks: Sequence[Chunk], hidden: torch.Tensor, steps: DraftSteps) -> None:
        if sum(chunk.count for chunk in chunks) != len(hidden):
            raise AssertionError(f"{len(hidden)} hidden states of {sum(chunk.count for chunk in chunks)} tokens")
        self.rows += len(chunks)
        for chunk, parts in zip(chunks, torch.split(hidden, [chunk.count for chunk in chunks]), strict=True):
            self._hidden.setdefault(chunk.slot, {}).update(enumerate(parts.clone(), chunk.start))
            key = chunk.slot, chunk.epoch
            if chunk.start > self._seen.get(key, chunk.start):
                raise AssertionError(f"{chunk.id} goes on at {chunk.start}, after {self._seen[key]}")
            self._seen[key] = chunk.start + chunk.count

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        guesses = torch.full((len(rows.slots), self._most), -1)
        for row, (slot, length) in enumerate(zip(rows.slots, rows.lengths.tolist(), strict=True)):
            if not torch.equal(rows.hidden[row], self._hidden[slot][length - 2]):
                raise AssertionError(f"hidden state {row} is not that of the token before the last")
            ids = self._guess(rows.history[slot, :length].tolist())
            guesses[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        return guesses

    def _guess(self, known: list[int]) -> list[int]:
        text = next((text for text in self.texts if text[: len(known)] == known), [])
        right = text[len(known) :][: self._draw.randint(0, self._most)]
        draw = self._draw
        return [token if draw.random() < self.chance else draw.randrange(self._vocab_size) for token in right]
