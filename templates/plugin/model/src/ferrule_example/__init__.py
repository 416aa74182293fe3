"""Llama, in which a learned gate decides how much each layer adds."""

from __future__ import annotations

import torch
from torch import nn

from ferrule.interfaces.model import ForwardContext
from ferrule_nn import Decoder, DecoderLayer, Rotation


class GatedLayer(DecoderLayer):
    """A layer that computes x + gate * (layer(x) - x)."""

    def __init__(self, owner: Decoder, index: int) -> None:
        super().__init__(owner, index)
        self.gate = nn.Parameter(torch.empty(1))

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None) -> torch.Tensor:
        return x + self.gate * (super().forward(x, ctx, rotation) - x)


class Example(Decoder):
    """A model that overrides what is special about it: numbers, parts, names. `Decoder` is Llama."""

    conformance = "ferrule_example.conformance:SETTINGS"

    def make_layer(self, index: int) -> nn.Module:
        return GatedLayer(self, index)
