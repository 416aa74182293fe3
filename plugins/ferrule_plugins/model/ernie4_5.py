"""ERNIE 4.5 (Baidu 2025), the dense models: Llama that turns neighbouring features."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec


class Ernie45(Decoder):
    config_defaults = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "use_bias": False,
        "tie_word_embeddings": True,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        bias = bool(ctx.config["use_bias"])
        return DecoderSpec.of(ctx, rope_interleaved=True, qkv_bias=bias, out_bias=bias, mlp_bias=bias)
