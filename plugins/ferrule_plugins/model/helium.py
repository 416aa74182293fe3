"""Helium 1 (Kyutai 2025): Llama that turns neighbouring features."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec


class Helium(Decoder):
    config_defaults = {"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100000.0}

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, rope_interleaved=True, out_bias=False)
