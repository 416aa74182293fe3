"""Token and position embeddings, and the head that maps back to the vocabulary."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.nn.linear import Linear, Packed, parameter


class Embedding(nn.Module):
    """Rows of a table [count, size]; `scale` multiplies them, in the table's type."""

    def __init__(self, count: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = parameter(count, size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(ids, self.weight)
        if self.scale == 1.0:
            return rows
        return rows * torch.tensor(self.scale, dtype=rows.dtype, device=rows.device)


class Head(nn.Module):
    """Hidden states to logits, float32. With `tied` it uses that embedding's table and has no parameters.

    `scale` multiplies the logits; `soft_cap` c maps them to c tanh(logits / c).
    """

    def __init__(self, hidden_size: int, vocab_size: int, tied: Embedding | None = None, bias: bool = False) -> None:
        super().__init__()
        self._tied = (tied,)  # in a tuple: not a child of this module
        self.absorbs = ("weight",) if tied is not None else ()
        self.scale = 1.0
        self.soft_cap = 0.0
        self._packed: Packed | None = None
        self.weight = parameter(vocab_size, hidden_size) if tied is None else None
        self.bias = parameter(vocab_size) if bias else None

    def _table(self) -> torch.Tensor:
        tied = self._tied[0]
        table: torch.Tensor | None = self.weight if tied is None else tied.weight
        if table is None:
            raise RuntimeError("a head that is not tied has a table of its own")
        return table

    def pack(self) -> None:
        """A tied table is kept beside its packed form: the embedding reads it row by row."""
        self._packed = Packed.of(self._table())
        if self._packed is not None and self.weight is not None:
            self.weight = parameter(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab]."""
        if self._packed is not None:
            logits = self._packed.matmul(hidden, self.bias)
        else:
            logits = F.linear(hidden, self._table(), self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits.float()


def pack(model: nn.Module) -> None:
    """Pack every layer of a loaded model that has a packed form. Their parameters are empty afterwards."""
    for module in model.modules():
        if isinstance(module, Linear | Head):
            module.pack()
