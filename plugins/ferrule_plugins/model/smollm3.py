"""SmolLM3 (Bakouch et al. 2025): Llama where every fourth layer has no rotary positions."""

from __future__ import annotations

from dataclasses import replace

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec


class SmolLM3(Decoder):
    """SmolLM 3. `no_rope_layers` has 1 for a layer *with* rotary positions."""

    config_defaults = {
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        spec, period = DecoderSpec.of(ctx), int(c["no_rope_layer_interval"])
        stated = c.get("no_rope_layers")
        turning = tuple(map(bool, stated or ((index + 1) % period for index in range(spec.num_layers))))
        window = int(c.get("sliding_window") or 0) if c["use_sliding_window"] and ctx.sliding_window else 0
        sliding = spec.sliding if c.get("layer_types") else tuple(not turns for turns in turning)
        return replace(spec, turning=turning, windows=tuple(window if slides else 0 for slides in sliding))
