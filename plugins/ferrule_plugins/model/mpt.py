"""MPT (MosaicML 2023): linear biases for positions, layer norms without biases, merged projections."""

from __future__ import annotations

from dataclasses import replace

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, Naming, alibi_slopes

# Settings of which no published model of these architectures has another value.
_FIXED = {"no_bias": True, "logit_scale": None, "norm_type": "low_precision_layernorm"}
_FIXED_ATTENTION = {"alibi": True, "qk_ln": False, "prefix_lm": False, "attn_type": "multihead_attention"}


class MPT(Decoder):
    config_names = {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    config_defaults = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    naming = Naming(
        renames=(
            (r"^transformer\.", ""),
            (r"^wte\.", "embed_tokens."),
            (r"^norm_f\.", "norm."),
            (r"^blocks\.(\d+)\.", r"layers.\1."),
            (r"\.norm_1\.", ".input_layernorm."),
            (r"\.norm_2\.", ".post_attention_layernorm."),
            (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
            (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.ffn\.", ".mlp."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c, attention = ctx.config, ctx.config.get("attn_config") or {}
        for settings, fixed in ((c, _FIXED), (attention, _FIXED_ATTENTION)):
            for key, value in fixed.items():
                if settings.get(key, value) != value:
                    raise CheckpointError(f"config.json: {key!r} {settings[key]!r} is not supported for MPT.")
        scale = attention.get("softmax_scale")
        spec = DecoderSpec.of(
            ctx,
            num_kv_heads=int(c["num_attention_heads"]),
            inner_size=4 * int(c["hidden_size"]),
            norm="layer",
            norm_bias=False,
            gated=False,
            act="gelu",
            qkv_clip=float(attention.get("clip_qkv") or 0.0),
            attention_scale=None if scale is None else float(scale),
        )
        return replace(spec, alibi_slopes=alibi_slopes(spec.num_heads, float(attention.get("alibi_bias_max", 8))))
