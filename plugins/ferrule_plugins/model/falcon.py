"""Falcon (Almazrouei et al. 2023): the decoder of 7B, the new one of 40B, 180B and 11B, and RefinedWeb's with ALiBi."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ferrule.interfaces.model import BuildContext
from ferrule_nn import (
    Decoder,
    DecoderLayer,
    DecoderSpec,
    Naming,
    ParallelLayer,
    TwoNormParallelLayer,
    alibi_slopes,
)


class Falcon(Decoder):
    """The Falcon models. The merged tensor has the rows of each key head in turn, also where there is one, or one for
    each query head.
    """

    config_names = {"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    config_defaults = {
        "layer_norm_epsilon": 1e-5,
        "activation": "gelu",
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "tie_word_embeddings": True,
    }
    naming = Naming(
        renames=(
            (r"^transformer\.", ""),
            (r"^word_embeddings\.", "embed_tokens."),
            (r"^ln_f\.", "norm."),
            (r"^h\.(\d+)\.", r"layers.\1."),
            (r"\.ln_attn\.", ".input_layernorm."),
            (r"\.ln_mlp\.", ".post_attention_layernorm."),
            (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
            (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
            (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        one = c["multi_query"] and not c["new_decoder_architecture"]
        heads, bias = int(c["num_attention_heads"]), bool(c["bias"])
        spec = DecoderSpec.of(
            ctx,
            num_kv_heads=1 if one else int(c.get("num_kv_heads") or heads),
            inner_size=int(c.get("ffn_hidden_size") or 4 * c["hidden_size"]),
            norm="layer",
            gated=False,
            act=str(c["activation"]),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            qkv_by_group=True,
        )
        if not c["alibi"]:
            return spec
        slopes = alibi_slopes(heads)  # the biases are scaled like the scores
        return replace(spec, alibi_slopes=tuple(slope * spec.head_dim**-0.5 for slope in slopes))

    def make_layer(self, index: int) -> nn.Module:
        c = self.config
        if not c["parallel_attn"]:
            return DecoderLayer(self, index)
        norms = (c.get("num_ln_in_parallel_attn") or 2) if c["new_decoder_architecture"] else 1
        return (TwoNormParallelLayer if norms == 2 else ParallelLayer)(self, index)
