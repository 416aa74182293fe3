"""GLM-4.5 and 4.6 (GLM-4.5 Team 2025): DeepSeek-V3's router beside grouped-query attention that rotates half a head."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec, MoEDecoder, MoESpec, Naming, read_grouped_routing, read_moe

NAMES = ((r"^model\.", ""), (r"\.shared_experts\.", ".shared_expert."))


class Glm4Moe(MoEDecoder):
    naming = Naming(renames=NAMES)
    config_defaults = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, out_bias=False, qk_norm="head" if ctx.config.get("use_qk_norm") else "")

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        return read_moe(ctx, read_grouped_routing(ctx, renormalise=True), correction=True)
