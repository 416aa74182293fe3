"""Gemma 3 (Gemma Team 2025): norms around each block and on each head, one layer of six sees everything.

The other layers have a window and rotary positions of their own, which are not scaled.
"""

from __future__ import annotations

from dataclasses import replace

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, Rope, RopeConfig, SandwichLayer


class Gemma3(Decoder):
    """The text models of Gemma 3. Published files leave out most sizes."""

    layer_class = SandwichLayer
    config_defaults = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        if c.get("use_bidirectional_attention"):
            raise CheckpointError("config.json: 'use_bidirectional_attention' makes this Gemma 3 an encoder.")
        spec = DecoderSpec.of(
            ctx,
            period=int(c["sliding_window_pattern"]),
            norm_offset=1.0,
            qk_norm="head",
            act=str(c["hidden_activation"]),
            attention_scale=float(c["query_pre_attn_scalar"]) ** -0.5,
            logits_soft_cap=float(c.get("final_logit_softcapping") or 0.0),
        )
        return replace(spec, embedding_scale=spec.hidden_size**0.5)

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        return Rope(RopeConfig.of(ctx.config, self.spec.head_dim, "full_attention"))

    def make_local_rope(self, ctx: BuildContext) -> Rope | None:
        theta = float(ctx.config["rope_local_base_freq"])
        return Rope(RopeConfig.local(ctx.config, self.spec.head_dim, theta))


class Gemma3TextPart(Gemma3):
    """The text part of Gemma 3 with images."""

    naming = Gemma3.naming.of_text_part()
