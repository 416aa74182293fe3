"""GLM-4 (GLM Team 2024): half of each head turns, neighbour with neighbour; biases on queries, keys and values."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, Naming, SandwichLayer


class GLM(Decoder):
    config_defaults = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, out_bias=False, rope_interleaved=True)


class GLM4(GLM):
    """GLM-4-0414: norms around each block."""

    layer_class = SandwichLayer
    naming = Naming(
        renames=(
            (r"^model\.", ""),
            (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
            (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
            (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
        )
    )
