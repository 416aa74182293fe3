"""dots.llm1 (rednote-hilab 2025): DeepSeek-V3's router, norms on each head's queries and keys, some layers sliding."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec, MoEDecoder, MoESpec, Naming, read_grouped_routing, read_moe
from ferrule_plugins.model.glm4_moe import NAMES


class Dots1(MoEDecoder):
    naming = Naming(renames=NAMES)
    config_defaults = {
        "num_key_value_heads": 32,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "moe_intermediate_size": 1408,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, qk_norm="head")

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        return read_moe(ctx, read_grouped_routing(ctx), correction=True)
