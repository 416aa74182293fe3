"""Jamba (Lieber et al. 2024): Mamba-1 layers and a few of attention without positions; experts in some layers."""

from __future__ import annotations

from collections.abc import Container
from functools import partial

from torch import nn

from ferrule.interfaces.model import BuildContext
from ferrule_nn import (
    DecoderSpec,
    MambaMixer,
    MambaSpec,
    MoEDecoder,
    MoESpec,
    Naming,
    RMSNorm,
    Rope,
    need,
    read_moe,
    read_routing,
)


class Jamba(MoEDecoder):
    config_defaults = {"num_key_value_heads": 8}
    naming = Naming(
        renames=(
            (r"^model\.", ""),
            (r"^final_layernorm\.", "norm."),
            (r"\.mamba\.", ".self_attn."),
            (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
            (r"\.feed_forward\.router\.", ".mlp.gate."),
            (r"\.feed_forward\.", ".mlp."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        spec = super().describe(ctx)
        self.attending = _each(ctx, spec.num_layers, "attn_layer")
        self.mamba = MambaSpec.of(ctx.config, norm=partial(RMSNorm, eps=spec.norm_eps))
        return spec

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        return read_moe(ctx, read_routing(ctx))

    def describe_sparse(self, ctx: BuildContext) -> Container[int]:
        layers = int(need(ctx.config, "num_hidden_layers"))
        return _each(ctx, layers, "expert_layer") if int(need(ctx.config, "num_experts")) > 1 else ()

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        return None

    def make_attention(self, index: int) -> nn.Module:
        if index in self.attending:
            return super().make_attention(index)
        return MambaMixer(f"layers.{index}.mamba", self.mamba)


def _each(ctx: BuildContext, num_layers: int, name: str) -> range:
    """Return every `{name}_period`-th layer, from `{name}_offset` on."""
    return range(int(need(ctx.config, f"{name}_offset")), num_layers, int(need(ctx.config, f"{name}_period")))
