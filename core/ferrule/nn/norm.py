"""Normalisations. They compute in float32 and return the type of their input."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.nn.linear import parameter


class RMSNorm(nn.Module):
    """x / rms(x) * w over the last dimension (Zhang and Sennrich 2019).

    With `offset` o, as Gemma has it, the factor is (o + w) and is applied in float32.
    """

    def __init__(self, size: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (wide * scale * (self.weight.float() + self.offset)).to(x.dtype)
        return (wide * scale).to(x.dtype) * self.weight


class LayerNorm(nn.Module):
    """(x - mean) / std * w + b over the last dimension."""

    def __init__(self, size: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.size = (size,)
        self.eps = eps
        self.weight = parameter(size)
        self.bias = parameter(size) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)
