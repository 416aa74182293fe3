"""Token and position embeddings, and the head that maps back to the vocabulary."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.nn.linear import Linear, parameter


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
        if tied is None:
            linear = Linear(hidden_size, vocab_size, bias)
            self.weight, self.bias = linear.weight, linear.bias
        else:
            self.bias = parameter(vocab_size) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab]."""
        tied = self._tied[0]
        logits = F.linear(hidden, self.weight if tied is None else tied.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits.float()
