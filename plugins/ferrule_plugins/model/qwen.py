"""Qwen 1 (Bai et al. 2023): Llama with GPT-2's names, and biases on queries, keys and values.

Beyond the training length its code scales rotation and scores; a server's context ends there (`seq_length`).
"""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, Naming


class Qwen(Decoder):
    """The first Qwen. `intermediate_size` counts both halves of the gated MLP."""

    config_names = {"kv_channels": "head_dim", "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    naming = Naming(
        renames=(
            (r"^transformer\.", ""),
            (r"^wte\.", "embed_tokens."),
            (r"^ln_f\.", "norm."),
            (r"^h\.(\d+)\.", r"layers.\1."),
            (r"\.ln_1\.", ".input_layernorm."),
            (r"\.ln_2\.", ".post_attention_layernorm."),
            (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
            (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
            (r"\.mlp\.w1\.", ".mlp.up_proj."),
            (r"\.mlp\.w2\.", ".mlp.gate_proj."),
            (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, inner_size=int(ctx.config["intermediate_size"]) // 2, qkv_bias=True)
