"""Command R, R+, R7B and A (Cohere 2024): attention and MLP side by side, layer norms without biases, scaled logits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Attention, AttentionSpec, Decoder, DecoderSpec, ParallelLayer, Shared, outputs, parameter


class LayerNormPerHead(nn.Module):
    """A layer norm without bias of x [tokens, heads, dim]; each head has weights of its own."""

    def __init__(self, heads: int, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(heads, dim, division=outputs(Shared(heads)).of(heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class PerHeadNormAttention(Attention):
    """An attention with a `LayerNormPerHead` of queries, and one of keys."""

    def make_qk_norm(self, spec: AttentionSpec, heads: int) -> nn.Module | None:
        return LayerNormPerHead(heads, spec.head_dim, eps=1e-5)


class Cohere(Decoder):
    layer_class = ParallelLayer
    config_defaults = {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(
            ctx,
            norm="layer",
            norm_bias=False,
            rope_interleaved=True,
            logits_scale=float(ctx.config["logit_scale"]),
        )

    def make_attention(self, index: int) -> nn.Module:
        """Make the attention of a layer; Command R+ has norms on its heads."""
        kind = PerHeadNormAttention if self.config.get("use_qk_norm") else Attention
        return kind(f"layers.{index}.attn", self.spec.attention(index), self.rope_of(index))


class Cohere2(Cohere):
    """R7B and A: three layers of four have a window; the others have no positions at all."""

    config_defaults = {
        **Cohere.config_defaults,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        numbers = DecoderSpec.of(ctx, period=int(c["sliding_window_pattern"]))
        spec = super().describe(ctx)
        return replace(spec, windows=numbers.windows, sliding=numbers.sliding, turning=numbers.sliding)
