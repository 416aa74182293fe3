"""Token and position embeddings, and the head that maps back to the vocabulary."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.interfaces.model import InputEmbeds
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_nn.linear import Dense, Linear, parameter


class Embedding(nn.Module):
    """Rows of a table [count, size]; `scale` multiplies them, in the table's type. `given` ones take their place."""

    def __init__(self, count: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight: torch.Tensor = parameter(count, size)
        self._packed: DenseMatrix | None = None

    def read_from(self, matrix: DenseMatrix) -> None:
        """The table is in `matrix` now, whose memory may be the table's."""
        self._packed = matrix
        self.leave()

    def leave(self) -> None:
        """The table is elsewhere, or comes there (`read_from`): `weight` keeps its width, but has no rows."""
        none = self.weight.detach().new_empty(0, self.weight.shape[1])
        del self.weight
        self.weight = none  # no parameter: no checkpoint fills it

    def forward(self, ids: torch.Tensor, given: InputEmbeds | None = None) -> torch.Tensor:
        rows = F.embedding(ids, self.weight) if self._packed is None else self._packed.rows(ids)
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
        self.absorbs = ("weight",) if tied is not None else ()
        self.scale = 1.0
        self.soft_cap = 0.0
        self._tied = (tied,)  # in a tuple: it is no child of this
        if tied is not None:
            self.weight = cast(nn.Parameter, tied.weight)  # which it is until it is packed

    @property
    def tied(self) -> Embedding | None:
        """The embedding whose table this is."""
        return self._tied[0]

    def pack(self) -> None:
        """A tied table is kept once where its rows can be read from the head's form of it, else twice."""
        super().pack()
        tied, scheme = self.tied, self.scheme
        if tied is not None and isinstance(scheme, Dense) and scheme.matrix is not None:
            tied.read_from(scheme.matrix)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab]."""
        logits = super().forward(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits.float()
