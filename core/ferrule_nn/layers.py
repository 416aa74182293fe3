"""Layers whose norms are in other places than Llama's: values of `Decoder.layer_class`.

Attention and MLP are the owner's. Like `DecoderLayer` they begin with the norm `input_layernorm`: the layer before
them computes it together with its last sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ferrule.interfaces.model import ForwardContext
from ferrule_nn.decoder import DecoderLayer
from ferrule_nn.norm import add_and_norm
from ferrule_nn.rope import Rotation


class ParallelLayer(DecoderLayer):
    """A layer x + attention(norm(x)) + mlp(norm(x)) (Wang and Komatsuzaki 2021), with one norm or a norm for each."""

    separate = False  # whether the MLP has a norm of its own, `post_attention_layernorm`

    def __init__(self, owner: Any, index: int) -> None:
        super().__init__(owner, index)
        if not self.separate:
            del self.post_attention_layernorm

    def fused(
        self, x: torch.Tensor, y: torch.Tensor, after: nn.Module, ctx: ForwardContext, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.mlp(self.post_attention_layernorm(x) if self.separate else y)
        return add_and_norm(after, self.add(x, self.self_attn(y, ctx, rotation)), inner, self.residual_scale)


class TwoNormParallelLayer(ParallelLayer):
    """A layer x + attention(norm(x)) + mlp(other norm(x))."""

    separate = True


class OutputNormLayer(DecoderLayer):
    """A layer x + norm(attention(x)), then x + norm(mlp(x)) (OLMo Team 2025)."""

    def __init__(self, owner: Any, index: int) -> None:
        super().__init__(owner, index)
        self.input_layernorm = nn.Identity()
        self.post_feedforward_layernorm = owner.make_norm()

    def fused(
        self, x: torch.Tensor, y: torch.Tensor, after: nn.Module, ctx: ForwardContext, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.add(x, self.post_attention_layernorm(self.self_attn(y, ctx, rotation)))
        return add_and_norm(after, x, self.post_feedforward_layernorm(self.mlp(x)), self.residual_scale)


class SandwichLayer(DecoderLayer):
    """A layer x + norm(attention(norm(x))), then x + norm(mlp(norm(x))) (Ding et al. 2021)."""

    def __init__(self, owner: Any, index: int) -> None:
        super().__init__(owner, index)
        self.pre_feedforward_layernorm = owner.make_norm()
        self.post_feedforward_layernorm = owner.make_norm()

    def fused(
        self, x: torch.Tensor, y: torch.Tensor, after: nn.Module, ctx: ForwardContext, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.post_attention_layernorm(self.self_attn(y, ctx, rotation))
        x, y = add_and_norm(self.pre_feedforward_layernorm, x, y, self.residual_scale)
        return add_and_norm(after, x, self.post_feedforward_layernorm(self.mlp(y)), self.residual_scale)
