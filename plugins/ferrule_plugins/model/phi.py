"""Phi-1, Phi-1.5 and Phi-2 (Li et al. 2023): attention and MLP side by side, layer norms, biases everywhere."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, Naming, ParallelLayer


class Phi(Decoder):
    layer_class = ParallelLayer
    config_defaults = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
    naming = Naming(
        renames=(
            (r"^model\.", ""),
            (r"^final_layernorm\.", "norm."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
            (r"\.mlp\.fc1\.", ".mlp.up_proj."),
            (r"\.mlp\.fc2\.", ".mlp.down_proj."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(
            ctx,
            norm="layer",
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            head_bias=True,
            qk_norm="head" if ctx.config.get("qk_layernorm") else "",
        )
