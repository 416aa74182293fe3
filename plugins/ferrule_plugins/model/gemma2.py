"""Gemma 2 (Gemma Team 2024): norms around each block, every second layer sliding, capped scores and logits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import Decoder, DecoderSpec, RMSNorm, Rotation, layer_windows


class Gemma2Layer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, owner: Decoder, index: int) -> None:
        super().__init__()
        self.input_layernorm = owner.make_norm()
        self.self_attn = owner.make_attention(index)
        self.post_attention_layernorm = owner.make_norm()
        self.pre_feedforward_layernorm = owner.make_norm()
        self.mlp = owner.make_mlp(index)
        self.post_feedforward_layernorm = owner.make_norm()

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None) -> torch.Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), ctx, rotation))
        y: torch.Tensor = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x + y


class Gemma2(Decoder):
    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        spec = DecoderSpec.of(ctx)
        windows = layer_windows(ctx, spec.num_layers)
        if not c.get("layer_types"):  # layers 0, 2, 4 … slide
            windows = tuple(0 if index % 2 else window for index, window in enumerate(windows))
        return replace(
            spec,
            act=str(c.get("hidden_activation") or "gelu_pytorch_tanh"),
            tied=bool(c.get("tie_word_embeddings", True)),
            windows=windows,
            embedding_scale=spec.hidden_size**0.5,
            attention_scale=float(c.get("query_pre_attn_scalar", 256)) ** -0.5,
            attention_soft_cap=float(c.get("attn_logit_softcapping", 50.0) or 0.0),
            logits_soft_cap=float(c.get("final_logit_softcapping", 30.0) or 0.0),
        )

    def make_norm(self) -> nn.Module:
        return RMSNorm(self.spec.hidden_size, self.spec.norm_eps, offset=1.0)

    def make_layer(self, index: int) -> nn.Module:
        return Gemma2Layer(self, index)
