"""GPT-NeoX (Black et al. 2022), and Pythia: attention and MLP side by side, each with a norm; merged projections."""

from __future__ import annotations

from torch import nn

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderLayer, DecoderSpec, Naming, TwoNormParallelLayer


class GPTNeoX(Decoder):
    config_names = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    config_defaults = {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "attention_bias": True,
        "use_parallel_residual": True,
    }
    naming = Naming(
        renames=(
            (r"^gpt_neox\.", ""),
            (r"^embed_in\.", "embed_tokens."),
            (r"^embed_out\.", "lm_head."),
            (r"^final_layer_norm\.", "norm."),
            (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.attention\.dense\.", ".self_attn.o_proj."),
            (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
            (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
        ),
        ignored=(r"\.attention\.(masked_)?bias$",),  # causal masks that old files hold
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        heads = int(ctx.config["num_attention_heads"])
        return DecoderSpec.of(ctx, num_kv_heads=heads, norm="layer", gated=False, mlp_bias=True, qkv_by_group=True)

    def make_layer(self, index: int) -> nn.Module:
        return (TwoNormParallelLayer if self.config["use_parallel_residual"] else DecoderLayer)(self, index)
