"""Qwen 3 (Yang et al. 2025): Llama with an RMS norm on each head's queries and keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Attention, Decoder, DecoderSpec, RMSNorm
from ferrule_plugins.model.qwen2 import qwen_windows


class Qwen3(Decoder):
    def describe(self, ctx: BuildContext) -> DecoderSpec:
        spec = DecoderSpec.of(ctx)
        head_dim = int(ctx.config.get("head_dim") or 128)  # not hidden / heads when unstated
        return replace(spec, head_dim=head_dim, windows=qwen_windows(ctx, spec.num_layers))

    def make_attention(self, index: int) -> nn.Module:
        norm = partial(RMSNorm, eps=self.spec.norm_eps)
        return Attention(f"layers.{index}.attn", self.spec.attention(index, qk_norm=norm), self.rope)
