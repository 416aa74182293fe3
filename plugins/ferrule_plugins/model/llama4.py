"""Llama 4, the text part (Meta AI 2025): attention within chunks, layers without positions, one expert a token."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import Attention, DecoderSpec, MoEDecoder, MoESpec, Naming, need, read_moe, read_routing


class HeadScale(nn.Module):
    """A norm without weights: x / rms(x)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class GrowingAttention(Attention):
    """An attention without rotary positions. Queries grow with the logarithm of their position, in steps of `step`
    tokens.
    """

    def __init__(self, growth: float, step: float, *attention: Any) -> None:
        super().__init__(*attention)
        self.growth, self.step = growth, step

    def prepare(self, heads: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        factor = 1 + self.growth * torch.log1p(torch.floor((ctx.positions + 1) / self.step))
        heads[:, : self.spec.num_heads] *= factor.to(heads.dtype).view(-1, 1, 1)
        return heads


class Llama4(MoEDecoder):
    """The text models of Llama 4. `no_rope_layers` has 1 for a layer *with* rotary positions, whose queries see their
    own chunk.
    """

    naming = Naming(
        renames=(
            (r"^(language_model\.)?model\.", ""),
            (r"^language_model\.", ""),
            (r"\.feed_forward\.", ".mlp."),
            (r"\.mlp\.router\.", ".mlp.gate."),
        ),
        transposed=(r"\.experts\.(gate_up|down)_proj$",),
        ignored=(r"^vision_model\.", r"^multi_modal_projector\."),
    )
    config_defaults = {
        "intermediate_size_mlp": 16384,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        period, layers = int(c["no_rope_layer_interval"]), int(need(c, "num_hidden_layers"))
        turning = tuple(map(bool, c.get("no_rope_layers") or ((index + 1) % period for index in range(layers))))
        chunk, inner = int(c["attention_chunk_size"] or 0), int(c["intermediate_size_mlp"])
        self.chunk = chunk if ctx.max_model_len > chunk else 0  # no text is longer than the first one
        return DecoderSpec.of(
            ctx, inner_size=inner, turning=turning, rope_interleaved=True, norm_turned=True, windows=()
        )

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        inner = int(need(ctx.config, "intermediate_size"))
        return read_moe(ctx, read_routing(ctx, scores="sigmoid"), shared_size=inner, weigh_inputs=True)

    def describe_sparse(self, ctx: BuildContext) -> Container[int]:
        c = ctx.config
        step = int(c.get("interleave_moe_layer_step") or 1)
        stated = c.get("moe_layers")
        return range(step - 1, int(need(c, "num_hidden_layers")), step) if stated is None else stated

    def make_attention(self, index: int) -> nn.Module:
        spec, c = self.spec.attention(index), self.config
        layer = f"layers.{index}.attn"
        if self.rope_of(index) is not None:
            norm = (lambda size: HeadScale(self.spec.norm_eps)) if c["use_qk_norm"] else None
            return Attention(layer, replace(spec, qk_norm=norm, chunk=self.chunk), self.rope)
        if not c["attn_temperature_tuning"]:
            return Attention(layer, spec)
        return GrowingAttention(float(c["attn_scale"]), float(c["floor_scale"]), layer, spec)


class Llama4TextPart(Llama4):
    """The text part of Llama 4 with images."""

    naming = Llama4.naming.of_text_part()
