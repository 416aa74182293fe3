"""Matrix products with learned weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F


class LinearScheme(Protocol):
    """How a linear layer keeps its weights and multiplies by them: the one seam that quantization replaces."""

    def allocate(self, layer: Linear, bias: bool) -> None:
        """Register the parameters of `layer`, uninitialised, with the default type and device."""

    def matmul(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in] to [..., out]."""


class Dense:
    """Weights [out, in] as they are."""

    def allocate(self, layer: Linear, bias: bool) -> None:
        layer.weight = parameter(layer.out_features, layer.in_features)
        layer.bias = parameter(layer.out_features) if bias else None

    def matmul(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, layer.weight, layer.bias)


class Linear(nn.Module):
    """y = x Wᵀ + b."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, scheme: LinearScheme | None = None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.scheme: LinearScheme = scheme or Dense()
        self.scheme.allocate(self, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.matmul(self, x)


class MergedLinear(Linear):
    """Several projections of one input in one product. `parts` maps a checkpoint's name for each to its rows."""

    def __init__(
        self, in_features: int, parts: Mapping[str, int], bias: bool = False, scheme: LinearScheme | None = None
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias, scheme)
        self.parts = dict(parts)


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter of the default type on the default device."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
