"""Qwen 1.5 and 2 with experts (Yang et al. 2024): small experts, and a gated one that every token uses."""

from __future__ import annotations

from dataclasses import replace

from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec, MoEDecoder, MoESpec, need, read_moe, read_routing
from ferrule_plugins.model.qwen2 import QWEN_DEFAULTS, qwen_windows


class Qwen2Moe(MoEDecoder):
    config_defaults = {
        **QWEN_DEFAULTS,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "moe_intermediate_size": 1408,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        spec = DecoderSpec.of(ctx)
        bias = bool(ctx.config["qkv_bias"])
        return replace(spec, qkv_bias=bias, windows=_windows(ctx, spec.num_layers))

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        shared = int(need(ctx.config, "shared_expert_intermediate_size"))
        return read_moe(ctx, read_routing(ctx), shared_size=shared, shared_gate=True)


def _windows(ctx: BuildContext, num_layers: int) -> tuple[int, ...]:
    """Return the layers' windows; without `layer_types`, on every second layer before `max_window_layers`, as
    transformers has it.
    """
    config = ctx.config
    if config.get("layer_types") or not (config.get("use_sliding_window") and ctx.sliding_window):
        return qwen_windows(ctx, num_layers)
    window, first_full = int(config["sliding_window"] or 0), int(config["max_window_layers"])
    return tuple(window if index % 2 == 0 and index < first_full else 0 for index in range(num_layers))
