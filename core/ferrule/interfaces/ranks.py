"""The part of a model that one of several devices serves, and how these devices exchange tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Collectives(ABC):
    """The exchange of tensors between the ranks of one model.

    All ranks make the same calls in the same order, with tensors of the same shape and type. A platform supplies them.
    """

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, with the same bits in each rank. May overwrite `x`."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors [..., n] in the order of ranks, as one tensor [..., size * n]."""


class Alone(Collectives):
    """The collectives of a single rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's place among the `size` ranks that divide each layer of a model, within stage `stage` of its layers.

    There is one stage today: models of `ferrule_nn` refuse others.
    """

    rank: int = 0
    size: int = 1
    stage: int = 0
    collectives: Collectives = Alone()


WHOLE = Shard()  # of a model that one device serves
