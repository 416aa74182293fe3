"""Qwen3-Next and Qwen 3.5 (Qwen Team 2025): three layers of gated delta net for each one of gated attention."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial

from torch import nn

from ferrule.interfaces.model import BuildContext
from ferrule_nn import (
    Decoder,
    DecoderSpec,
    DeltaSpec,
    GatedAttention,
    GatedDelta,
    MoEDecoder,
    MoESpec,
    Naming,
    RMSNorm,
    need,
    read_moe,
    read_routing,
    sparse_layers,
)


class DeltaDecoder(Decoder):
    """The order of layers, both kinds of attention, and norms whose factor is 1 + w."""

    naming = Naming(
        renames=((r"^model\.(language_model\.)?", ""), (r"\.linear_attn\.", ".self_attn.")),
        ignored=(r"^mtp\.", r"^model\.visual\."),  # predicts further tokens; reads images
    )
    config_defaults = {"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25}
    interleaved = False  # the order of the delta net's input projections, where `linear_interleaved` does not say

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        spec = replace(super().describe(ctx), windows=())
        every = int(c.get("full_attention_interval") or 4)
        kinds = c.get("layer_types")
        self.attending = {
            i for i in range(spec.num_layers) if (kinds[i] == "full_attention" if kinds else (i + 1) % every == 0)
        }
        self.delta = DeltaSpec(
            hidden_size=spec.hidden_size,
            num_key_heads=int(need(c, "linear_num_key_heads")),
            num_value_heads=int(need(c, "linear_num_value_heads")),
            key_dim=int(need(c, "linear_key_head_dim")),
            value_dim=int(need(c, "linear_value_head_dim")),
            kernel=int(c.get("linear_conv_kernel_dim", 4)),
            act=spec.act,
            norm_eps=spec.norm_eps,
            interleaved=bool(c.get("linear_interleaved", self.interleaved)),
        )
        return spec

    def make_norm(self) -> nn.Module:
        return RMSNorm(self.spec.hidden_size, self.spec.norm_eps, offset=1.0)

    def make_attention(self, index: int) -> nn.Module:
        if index not in self.attending:
            return GatedDelta(f"layers.{index}.delta", self.delta)
        norm = partial(RMSNorm, eps=self.spec.norm_eps, offset=1.0)
        return GatedAttention(f"layers.{index}.attn", self.spec.attention(index, qk_norm=norm), self.rope)


class Qwen35(DeltaDecoder):
    """The text part of Qwen 3.5: positions of images are not computed."""


class Qwen35Moe(DeltaDecoder, MoEDecoder):
    config_defaults = {
        **DeltaDecoder.config_defaults,
        "num_key_value_heads": 2,
        "intermediate_size": 0,  # all layers have experts
        "moe_intermediate_size": 512,
    }

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        shared = int(need(ctx.config, "shared_expert_intermediate_size"))
        return read_moe(ctx, read_routing(ctx, renormalise=True), shared_size=shared, shared_gate=True)

    def describe_sparse(self, ctx: BuildContext) -> Container[int]:
        return sparse_layers(ctx)


class Qwen3Next(Qwen35Moe):
    config_defaults = {**Qwen35Moe.config_defaults, "intermediate_size": 5632}
    interleaved = True
