"""LFM2 (Liquid AI 2025): gated short convolutions, and attention in some layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import (
    Attention,
    Decoder,
    DecoderSpec,
    Linear,
    Naming,
    RMSNorm,
    Rotation,
    ShortConv,
    first,
    inputs,
    need,
    outputs,
)


class GatedConv(nn.Module):
    """A gated convolution: out(c * conv(b * h)), with b, c, h = in(x)."""

    def __init__(self, name: str, size: int, kernel: int, bias: bool) -> None:
        super().__init__()
        self.in_proj = Linear(size, 3 * size, bias, split=outputs(0, 0, 0))
        self.conv = ShortConv(name, size, kernel, bias, act=None, split=outputs())
        self.out_proj = Linear(size, size, bias, split=inputs())

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None = None) -> torch.Tensor:
        b, c, h = self.in_proj(x).chunk(3, dim=-1)
        y: torch.Tensor = self.out_proj(c * self.conv(b * h, ctx))
        return y


class LFM2(Decoder):
    config_defaults = {"num_key_value_heads": 8, "rope_theta": 1e6}
    naming = Naming(
        renames=(
            (r"^model\.", ""),
            (r"^embedding_norm\.", "norm."),
            (r"\.operator_norm\.", ".input_layernorm."),
            (r"\.ffn_norm\.", ".post_attention_layernorm."),
            (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
            (r"^(layers\.\d+)\.conv\.", r"\1.self_attn."),
            (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
            (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
            (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        layers = int(need(c, "num_hidden_layers"))
        attending = c.get("full_attn_idxs")
        default = ["full_attention" if attending is None or i in attending else "conv" for i in range(layers)]
        self.kinds: list[str] = c.get("layer_types") or default
        self.kernel, self.conv_bias = int(c.get("conv_L_cache", 3)), bool(c.get("conv_bias", False))
        return DecoderSpec.of(
            ctx,
            inner_size=_inner_size(ctx),
            norm_eps=float(first(c, "norm_eps", "block_norm_eps", default=1e-5)),
            act="silu",
            qkv_bias=False,
            out_bias=False,
            tied=bool(first(c, "tie_embedding", "tie_word_embeddings", default=True)),
            windows=(),
        )

    def make_attention(self, index: int) -> nn.Module:
        spec = self.spec
        if self.kinds[index] == "conv":
            return GatedConv(f"layers.{index}.conv", spec.hidden_size, self.kernel, self.conv_bias)
        norm = partial(RMSNorm, eps=spec.norm_eps)
        return Attention(f"layers.{index}.attn", spec.attention(index, qk_norm=norm), self.rope)


def _inner_size(ctx: BuildContext) -> int:
    """Return the stated size, or two thirds of it, times a factor, rounded up to a multiple."""
    c = ctx.config
    size = int(need(c, "block_ff_dim", "intermediate_size"))
    if not c.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(float(first(c, "block_ffn_dim_multiplier", default=1.0)) * int(2 * size / 3))
    multiple = int(c.get("block_multiple_of", 256))
    return -(-size // multiple) * multiple
