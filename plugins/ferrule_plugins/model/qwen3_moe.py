"""Qwen 3 with experts (Yang et al. 2025): many small ones, and none that every token uses."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec, MoEDecoder
from ferrule_plugins.model.qwen2 import qwen_windows


class Qwen3Moe(MoEDecoder):
    config_defaults = {
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        windows = qwen_windows(ctx, int(ctx.config["num_hidden_layers"]))
        return DecoderSpec.of(ctx, qk_norm="head", windows=windows)
