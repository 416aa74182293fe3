"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, layer_windows

QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def qwen_windows(ctx: BuildContext, num_layers: int) -> tuple[int, ...]:
    """Return the layers' windows, 0 unless `use_sliding_window` is true; many files state a `sliding_window` that is
    not in use.
    """
    return layer_windows(ctx, num_layers) if ctx.config.get("use_sliding_window") else (0,) * num_layers


class Qwen2(Decoder):
    config_defaults = QWEN_DEFAULTS

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        spec = DecoderSpec.of(ctx)
        return replace(spec, qkv_bias=True, windows=qwen_windows(ctx, spec.num_layers))
