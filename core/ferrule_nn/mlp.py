"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.errors import CheckpointError
from ferrule_nn import ops
from ferrule_nn.division import inputs, outputs
from ferrule_nn.linear import Linear, MergedLinear
from ferrule_nn.parameters import parameter

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


# What config.json may name.
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
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
)


class XIELU(nn.Module):
    """The activation xIELU (Huang and Schlag 2024), an integral of ELU.

    It has two learned numbers and two constants of the checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = parameter(1), parameter(1)  # before softplus
        self.beta, self.eps = parameter(), parameter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        right = F.softplus(self.alpha_p) * x * x
        left = (torch.expm1(torch.minimum(x, self.eps)) - x) * (self.beta + F.softplus(self.alpha_n))
        return torch.where(x > 0, right, left) + self.beta * x


def activation(name: str) -> Activation:
    """Return the function that config.json calls `name`. Raises CheckpointError for an unknown one."""
    if name == "xielu":
        return XIELU()
    if name not in ACTIVATIONS:
        known = ", ".join((*ACTIVATIONS, "xielu"))
        raise CheckpointError(f"config.json asks for the activation {name!r}; known are {known}.")
    return ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """The block down(act(gate(x)) * up(x)) (Shazeer 2020).

    Ranks divide the inner numbers. A subclass that needs all of them at once sets `divided` to False: each rank then
    has the whole block.
    """

    divided: ClassVar[bool] = True

    def __init__(self, hidden_size: int, inner_size: int, act: str = "silu", bias: bool = False) -> None:
        super().__init__()
        projections = {"gate_proj": inner_size, "up_proj": inner_size}
        self.gate_up_proj = MergedLinear(hidden_size, projections, bias, split=outputs() if self.divided else None)
        self.down_proj = Linear(inner_size, hidden_size, bias, split=inputs() if self.divided else None)
        self.act = activation(act)
        self.act_name, self._inner_size = act, self.down_proj.in_features
        self._kernels = ops.for_layers()
        self._gate: ops.Rowwise | None = None

    def pack(self) -> None:
        self._gate = ops.gate(self._kernels, self.act_name, self._inner_size)

    def gated(self, both: torch.Tensor) -> torch.Tensor:
        """Compute act(gate) * up of rows [gate, up]."""
        if self._gate is not None and self._gate.accepts(both):
            return self._gate(both)
        gate, up = both.chunk(2, dim=-1)
        return self.act(gate) * up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.gated(self.gate_up_proj(x)))
        return y


class MLP(nn.Module):
    """The block down(act(up(x)))."""

    def __init__(self, hidden_size: int, inner_size: int, act: str, bias: bool = True) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, inner_size, bias, split=outputs())
        self.down_proj = Linear(inner_size, hidden_size, bias, split=inputs())
        self.act = activation(act)
        self._act_name, self._inner_size = act, self.down_proj.in_features
        self._kernels = ops.for_layers()
        self._activate: ops.Rowwise | None = None

    def pack(self) -> None:
        self._activate = ops.activation(self._kernels, self._act_name, self._inner_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up_proj(x)
        act = self._activate if self._activate is not None and self._activate.accepts(inner) else self.act
        y: torch.Tensor = self.down_proj(act(inner))
        return y
