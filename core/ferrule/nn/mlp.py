"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.errors import CheckpointError
from ferrule.nn.linear import Linear, MergedLinear

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def activation(name: str) -> Activation:
    """The function that config.json calls `name`. Raises CheckpointError for an unknown one."""
    known: dict[str, Activation] = {
        "silu": F.silu,
        "swish": F.silu,
        "relu": F.relu,
        "relu2": _relu2,
        "gelu": F.gelu,
        "gelu_new": _gelu_tanh,
        "gelu_fast": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "quick_gelu": _quick_gelu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
    }
    if name not in known:
        raise CheckpointError(f"config.json asks for the activation {name!r}; known are {', '.join(known)}.")
    return known[name]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, hidden_size: int, inner_size: int, act: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(hidden_size, {"gate_proj": inner_size, "up_proj": inner_size}, bias)
        self.down_proj = Linear(inner_size, hidden_size, bias)
        self.act = activation(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down_proj(self.act(gate) * up)
        return y


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, hidden_size: int, inner_size: int, act: str, bias: bool = True) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, inner_size, bias)
        self.down_proj = Linear(inner_size, hidden_size, bias)
        self.act = activation(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.act(self.up_proj(x)))
        return y
