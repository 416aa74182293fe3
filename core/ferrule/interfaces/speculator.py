"""`Speculator`: guesses of what a request will say next, which its next step computes and verifies all at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrule.types import Chunk

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class KnownRows:
    """Requests that have sampled in a step. history[slots[r], : lengths[r]] are the known ids of row r.

    How many these are may be known to the device only, if the row had guesses.
    """

    slots: tuple[int, ...]
    lengths: torch.Tensor  # [rows] int64
    history: torch.Tensor  # [slots, at least max_model_len] int32, not to be changed


class Speculator(ABC):
    """A source of guesses, called on the worker's thread for each step: `observe`, then `propose` if any row has
    sampled.

    Guesses need not be right. They cost the computation of a token each, and a request with guesses is planned again
    only when the result of its last step is known. Methods that wait for the device hold up steps.
    """

    def observe(self, chunks: Sequence[Chunk], hidden: torch.Tensor) -> None:
        """See what a step has computed: hidden states [tokens, hidden] of the tokens of all chunks.

        A new epoch in a slot is a new request. Hidden states behind a guess that was wrong mean nothing; the request's
        next chunk begins in their place, or before.
        """

    @abstractmethod
    def propose(self, rows: KnownRows) -> torch.Tensor:
        """Guess what follows each row: ids [rows, any number] int64 on the device, -1 from where there is no guess."""
