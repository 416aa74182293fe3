"""Bamba (IBM, Princeton, CMU, UIUC 2024): Mamba-2 layers, and attention in some; a gated MLP in each."""

from __future__ import annotations

from torch import nn

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, Mamba2Mixer, Mamba2Spec, Naming


class Bamba(Decoder):
    config_defaults = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    }
    naming = Naming(
        renames=(
            (r"^model\.", ""),
            (r"^final_layernorm\.", "norm."),
            (r"\.mamba\.", ".self_attn."),
            (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
            (r"\.feed_forward\.", ".mlp."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        self.attending = frozenset(ctx.config.get("attn_layer_indices") or ())
        self.mamba = Mamba2Spec.of(ctx.config)
        return DecoderSpec.of(ctx)

    def make_attention(self, index: int) -> nn.Module:
        if index in self.attending:
            return super().make_attention(index)
        return Mamba2Mixer(f"layers.{index}.mamba", self.mamba)
