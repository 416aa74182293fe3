"""The tokens that a step samples: several for a row with guesses, of which not all count.

A sample needs one uniform number for each row: a hash of the request's seed, the token's position, and a counter for
the draws of one position. There is no generator state, so preemption, another batch, or another number of steps in
flight give the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ferrule.runner.cache import Stage
from ferrule.runner.state import LongArray
from ferrule.types import Chunk


@dataclass(frozen=True)
class Draws:
    """The draws of a step, row by row: one for a row, and one more after each of its guesses."""

    rows: list[int]
    ahead: list[int]  # guesses of its row before each draw
    back: LongArray | int  # tokens of its row behind each draw's
    guesses: torch.Tensor | None = None  # [draws] int64, what each is expected to be, -1: nothing; None: no row has any

    @classmethod
    def of(cls, chunks: Sequence[Chunk], rows: list[int]) -> Draws:
        if not any(chunks[row].drafts for row in rows):
            return cls(rows, [0] * len(rows), 0)
        places = [(row, ahead) for row in rows for ahead in range(1 + chunks[row].drafts)]
        back = np.array([chunks[row].drafts - ahead for row, ahead in places])
        expected = [id for row in rows for id in (*guesses_of(chunks[row]), -1)]
        return cls([row for row, _ in places], [ahead for _, ahead in places], back, torch.tensor(expected))

    @cached_property
    def firsts(self) -> LongArray:
        """[rows] the first draw of each row."""
        return np.flatnonzero(np.array(self.ahead) == 0)

    def lengths(self, positions: LongArray, tokens: torch.Tensor, stage: Stage, host: bool) -> torch.Tensor:
        """Return how many tokens of each row are known, int64 [rows], given the `tokens` [draws] for these positions.

        Does not wait for the device that has the tokens, unless it is the `host`.
        """
        firsts = self.firsts
        least = positions[firsts] + 1
        if self.guesses is None:
            return stage([torch.from_numpy(least)])[0]
        if host:
            wrong = np.flatnonzero(tokens.numpy() != self.guesses.numpy())  # a tenth of what torch takes for it all
            return torch.from_numpy(least + wrong[np.searchsorted(wrong, firsts)] - firsts)
        widths = np.diff(firsts, append=len(self.rows))
        # A row that is shorter than others goes on with its last draw, which has no guess and so is never right.
        table = firsts[:, None] + np.minimum(np.arange(widths.max()), widths[:, None] - 1)
        first, places, expected = stage([torch.from_numpy(each) for each in (least, table)] + [self.guesses])
        return first + (tokens == expected)[places].long().cumprod(1).sum(1)


def guesses_of(chunk: Chunk) -> tuple[int, ...]:
    """Return the ids of a chunk that are guesses."""
    return chunk.new_ids[len(chunk.new_ids) - chunk.drafts :]
