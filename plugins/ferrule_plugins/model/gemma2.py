"""Gemma 2 (Gemma Team 2024): norms around each block, every second layer sliding, capped scores and logits."""

from __future__ import annotations

from dataclasses import replace

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, SandwichLayer


class Gemma2(Decoder):
    layer_class = SandwichLayer
    config_defaults = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        spec = DecoderSpec.of(
            ctx,
            period=2,
            norm_offset=1.0,
            act=str(c["hidden_activation"]),
            attention_scale=float(c["query_pre_attn_scalar"]) ** -0.5,
            attention_soft_cap=float(c["attn_logit_softcapping"] or 0.0),
            logits_soft_cap=float(c["final_logit_softcapping"] or 0.0),
        )
        return replace(spec, embedding_scale=spec.hidden_size**0.5)
