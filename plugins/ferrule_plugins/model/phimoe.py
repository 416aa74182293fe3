"""Phi-3.5-MoE (Abdin et al. 2024): layer norms, biases, LongRoPE, and SparseMixer's way of choosing two experts."""

from __future__ import annotations

from dataclasses import replace

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec, MoEDecoder, MoESpec, Naming, Rope, RopeConfig, read_moe, read_routing
from ferrule_plugins.model.mixtral import NAMES


class PhiMoe(MoEDecoder):
    naming = Naming(renames=(*NAMES, (r"\.mlp\.router\.", ".mlp.gate.")))  # adapters call it the router
    config_defaults = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "router_jitter_noise": 0.01,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, norm="layer", head_bias=bool(ctx.config.get("lm_head_bias")))

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        tolerance = float(ctx.config["router_jitter_noise"])
        return read_moe(ctx, read_routing(ctx, scores="sparsemixer", tolerance=tolerance))

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        config = RopeConfig.of(ctx.config, self.spec.head_dim)
        options = dict(config.options)
        short, long = options.get("short_mscale"), options.get("long_mscale")
        if short != long:
            raise CheckpointError(
                f"config.json: 'short_mscale' {short} and 'long_mscale' {long} differ, which is not implemented."
            )
        if short is not None and config.kind != "default":
            options["attention_factor"] = float(short)
        return Rope(replace(config, options=options))
