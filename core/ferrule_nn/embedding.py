"""Token and position embeddings, and the head that maps back to the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.interfaces.model import InputEmbeds
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_nn.linear import Linear
from ferrule_nn.parameters import parameter


class Embedding(nn.Module):
    """Rows of a table [count, size], times `scale`, in the table's type. Embeddings that are `given` replace them."""

    def __init__(self, count: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight: torch.Tensor = parameter(count, size)
        self._rows: Callable[[torch.Tensor], torch.Tensor] | None = None

    def read_by(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Have `rows` read the table from now on, from the head's packed form of it."""
        self._rows = rows
        self.remove_table()

    def read_from(self, matrix: DenseMatrix) -> None:
        """Read rows from `matrix` from now on: the head's packed form of the same table."""
        self.read_by(matrix.rows)

    def remove_table(self) -> None:
        """Have no table of its own: `weight` keeps its width, has no rows, and is not a parameter any more."""
        empty = self.weight.detach().new_empty(0, self.weight.shape[1])
        del self.weight
        self.weight = empty

    def forward(self, ids: torch.Tensor, given: InputEmbeds | None = None) -> torch.Tensor:
        rows = F.embedding(ids, self.weight) if self._rows is None else self._rows(ids)
        if self.scale != 1.0:
            rows = rows * rows.new_full((), self.scale)  # made on the device: a copy to it could not be recorded
        return rows if given is None else rows.index_copy(0, given.tokens, given.data.to(rows.dtype))


class Head(Linear):
    """Hidden states to logits, float32. With `tied` it uses that embedding's table and has no parameters of its own.

    `scale` multiplies the logits; `soft_cap` c maps them to c tanh(logits / c).
    """

    head = True

    def __init__(self, hidden_size: int, vocab_size: int, tied: Embedding | None = None, bias: bool = False) -> None:
        super().__init__(hidden_size, vocab_size, bias)
        self.ignored_tensors = ("weight",) if tied is not None else ()  # a copy of the embedding's
        self.scale = 1.0
        self.soft_cap = 0.0
        self._tied = (tied,)  # in a tuple, so that torch does not register it as a submodule
        if tied is not None:
            self.weight = cast(nn.Parameter, tied.weight)  # a parameter until it is packed

    @property
    def tied(self) -> Embedding | None:
        """The embedding whose table this is."""
        return self._tied[0]

    def pack(self) -> None:
        """Pack the weight. A tied embedding reads rows from the packed form if it can, else the table is kept twice."""
        super().pack()
        rows = None if self.tied is None else self.scheme.rows(self)
        if self.tied is not None and rows is not None:
            self.tied.read_by(rows)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab]."""
        logits = super().forward(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits.float()
