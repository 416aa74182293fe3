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

    def pack(self, layer: Linear) -> None:
        """Called once, when the weights are there: lay them out for the kernel that will read them."""

    def matmul(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Map x [tokens, in] to [tokens, out]. A row's result does not depend on the other rows."""


class Dense:
    """Weights [out, in] of the model's type. `pack` hands them to the CPU's matrix library, where it has a form."""

    def allocate(self, layer: Linear, bias: bool) -> None:
        layer.weight = parameter(layer.out_features, layer.in_features)
        layer.bias = parameter(layer.out_features) if bias else None

    def pack(self, layer: Linear) -> None:
        packed = Packed.of(layer.weight)
        if packed is not None:
            layer.packed = packed
            layer.weight = parameter(0)  # its memory is the packed form's now

    def matmul(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if layer.packed is not None:
            return layer.packed.matmul(x, layer.bias)
        return F.linear(x, layer.weight, layer.bias)


class Linear(nn.Module):
    """y = x Wᵀ + b."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    packed: Packed | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, scheme: LinearScheme | None = None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.packed = None
        self.scheme: LinearScheme = scheme or Dense()
        self.scheme.allocate(self, bias)

    def pack(self) -> None:
        self.scheme.pack(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.matmul(self, x)


class MergedLinear(Linear):
    """Several projections of one input in one product. `parts` maps a checkpoint's name for each to its rows."""

    def __init__(
        self, in_features: int, parts: Mapping[str, int], bias: bool = False, scheme: LinearScheme | None = None
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias, scheme)
        self.parts = dict(parts)


class Packed:
    """A matrix in the layout of oneDNN, the CPU's matrix library: two to three times as fast as one that is not.

    Its kernels sum up a row in an order that other rows have no part in; the one exception, a single row of float32, is
    avoided by doubling it. So a token's hidden state has the same bits alone and in a batch.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix

    @classmethod
    def of(cls, weight: torch.Tensor) -> Packed | None:
        """None where there is no such form: another device, another type, a torch without the library."""
        library = torch.ops.mkldnn
        if weight.device.type != "cpu" or not weight.numel() or not torch._C._has_mkldnn:
            return None
        if weight.dtype == torch.bfloat16 and library._is_mkldnn_bf16_supported() or weight.dtype == torch.float32:
            return cls(library._reorder_linear_weight(weight.detach(), None))
        return None

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [tokens, in] → [tokens, out]."""
        alone = x.shape[0] == 1 and x.dtype == torch.float32
        rows = x.expand(2, -1) if alone else x
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._matrix, bias, "none", [], "")
        return y[:1] if alone else y


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter of the default type on the default device."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
