"""Hunyuan, the dense models (Tencent 2025): Llama with a norm on each head, after its rotation."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, Naming


class HunyuanDense(Decoder):
    config_defaults = {"rms_norm_eps": 1e-5}
    naming = Naming(
        renames=(
            (r"^model\.", ""),
            (r"\.query_layernorm\.", ".q_norm."),
            (r"\.key_layernorm\.", ".k_norm."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, qk_norm="head", norm_turned=True)
