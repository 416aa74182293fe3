"""OLMo 1, 2 and 3 (Groeneveld et al. 2024, OLMo Team 2025)."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, OutputNormLayer, Rope, RopeConfig


class OLMo(Decoder):
    """Llama with layer norms that have no weights, and clipped projections in some sizes."""

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        clip = float(ctx.config.get("clip_qkv") or 0.0)
        return DecoderSpec.of(ctx, norm="layer", norm_affine=False, norm_eps=1e-5, qkv_clip=clip)


class OLMo2(Decoder):
    """Norms after each block, and on all queries and all keys together."""

    layer_class = OutputNormLayer
    config_defaults = {"rms_norm_eps": 1e-5}

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, qk_norm="width")


class OLMo3(OLMo2):
    """OLMo 2 where three layers of four have a window, and rotary positions that are not scaled."""

    config_defaults = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0}

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, period=4, qk_norm="width")

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        return Rope(RopeConfig.of(ctx.config, self.spec.head_dim, "full_attention"))

    def make_local_rope(self, ctx: BuildContext) -> Rope | None:
        return Rope(RopeConfig.local(ctx.config, self.spec.head_dim, 500000.0))
