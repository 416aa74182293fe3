"""InternLM 1, 2 and 3 (Cai et al. 2024): Llama, with names and a merged tensor of its own in version 2."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, Naming


class InternLM(Decoder):
    """The first InternLM. `bias` is of the four projections of attention."""

    config_names = {"bias": "attention_bias"}
    config_defaults = {"attention_bias": True}


class InternLM2(InternLM):
    config_defaults = {"attention_bias": True}
    naming = Naming(
        renames=(
            (r"^model\.", ""),
            (r"^tok_embeddings\.", "embed_tokens."),
            (r"^output\.", "lm_head."),
            (r"\.attention_norm\.", ".input_layernorm."),
            (r"\.ffn_norm\.", ".post_attention_layernorm."),
            (r"\.attention\.wqkv\.", ".self_attn.qkv_proj."),
            (r"\.attention\.wo\.", ".self_attn.o_proj."),
            (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
            (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
            (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, qkv_by_group=True)


class InternLM3(Decoder):
    """The third InternLM. `qkv_bias` is of queries, keys and values, `bias` of the other projections."""

    config_names = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
    config_defaults = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, out_bias=bool(ctx.config.get("mlp_bias", False)))
