"""EXAONE 4 (LG AI Research 2025): norms after each block and on each head.

In the large model three layers of four have a window, and only these have rotary positions.
"""

from __future__ import annotations

from dataclasses import replace

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, OutputNormLayer


class Exaone4(Decoder):
    layer_class = OutputNormLayer
    config_defaults = {
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        if c["sliding_window"] is None:
            return DecoderSpec.of(ctx, qk_norm="head")
        pattern = c["sliding_window_pattern"]  # a number, or letters such as LLLG
        spec = DecoderSpec.of(ctx, period=len(pattern) if isinstance(pattern, str) else int(pattern), qk_norm="head")
        return replace(spec, turning=spec.sliding)
