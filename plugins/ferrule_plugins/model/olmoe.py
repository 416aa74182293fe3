"""OLMoE (Muennighoff et al. 2024): many small experts, norms on all queries and all keys together."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec, MoEDecoder, MoESpec, need, read_moe, read_routing


class OlmoE(MoEDecoder):
    config_defaults = {"rms_norm_eps": 1e-5}

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, qk_norm="width", qkv_clip=float(ctx.config.get("clip_qkv") or 0.0))

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        return read_moe(ctx, read_routing(ctx), inner_size=int(need(ctx.config, "intermediate_size")))
