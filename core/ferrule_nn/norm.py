"""Normalisations. They compute in float32 and return the type of their input."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ferrule_nn import ops
from ferrule_nn.division import UNDIVIDED
from ferrule_nn.parameters import parameter


class RMSNorm(nn.Module):
    """The norm x / rms(x) * w over the last dimension (Zhang and Sennrich 2019).

    With `offset` o, as Gemma has it, the factor is (o + w) and is applied in float32.
    """

    def __init__(self, size: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = parameter(size, division=UNDIVIDED)
        self.kernels = ops.for_layers()
        self.kernel: ops.Norm | None = None

    def pack(self) -> None:
        self.kernel = norm_kernel(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernel is not None and self.kernel.accepts(x):
            return self.kernel(x)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (wide * scale * (self.weight.float() + self.offset)).to(x.dtype)
        return (wide * scale).to(x.dtype) * self.weight


def norm_kernel(norm: nn.Module) -> ops.Norm | None:
    """Return the kernel of an `RMSNorm` with loaded weights; None for other norms, including its subclasses."""
    return ops.rms_norm(norm.kernels, norm.weight, norm.eps, norm.offset) if type(norm) is RMSNorm else None


class LayerNorm(nn.Module):
    """The norm (x - mean) / std * (offset + w) + b over the last dimension, without b or without both."""

    def __init__(
        self, size: int, eps: float = 1e-5, bias: bool = True, affine: bool = True, offset: float = 0.0
    ) -> None:
        super().__init__()
        self.size = (size,)
        self.eps = eps
        self.offset = offset
        self.weight = parameter(size, division=UNDIVIDED) if affine else None
        self.bias = parameter(size, division=UNDIVIDED) if affine and bias else None
        self.kernels = ops.for_layers()
        self.kernel: ops.Norm | None = None

    def pack(self) -> None:
        weight = self._factor()
        if type(self) is LayerNorm and weight is not None:
            self.kernel = ops.layer_norm(self.kernels, weight, self.bias, self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernel is not None and self.kernel.accepts(x):
            return self.kernel(x)
        return F.layer_norm(x, self.size, self._factor(), self.bias, self.eps)

    def _factor(self) -> torch.Tensor | None:
        return self.weight + self.offset if self.offset and self.weight is not None else self.weight


def add_and_norm(
    norm: nn.Module, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + scale * y and its norm, in one pass over both where `norm` has a kernel."""
    kernel = norm.kernel if isinstance(norm, RMSNorm | LayerNorm) else None
    if kernel is not None and kernel.accepts(x) and kernel.accepts(y):
        return kernel.after(x, y, scale)
    x = x + (y if scale == 1.0 else y * scale)
    return x, norm(x)
