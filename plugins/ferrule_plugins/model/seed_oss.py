"""Seed-OSS (ByteDance Seed 2025): Llama with biases on queries, keys and values."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec


class SeedOss(Decoder):
    config_defaults = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, out_bias=bool(ctx.config["attention_out_bias"]))
