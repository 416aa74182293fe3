"""Apertus (Swiss AI 2025): Llama with a plain MLP that has a learned activation, and a norm on each head."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, Naming


class Apertus(Decoder):
    config_defaults = {
        "hidden_act": "xielu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 12e6,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    }
    naming = Naming(
        renames=(
            (r"^model\.", ""),
            (r"\.attention_layernorm\.", ".input_layernorm."),
            (r"\.feedforward_layernorm\.", ".post_attention_layernorm."),
            (r"\.act_fn\.", ".act."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, gated=False, qk_norm="head")
