"""MiniMax M2 (MiniMax 2025): sigmoid scores with a bias for the choice, norms on all queries and all keys together."""

from __future__ import annotations

from dataclasses import replace

from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec, MoEDecoder, MoESpec, Naming, Rope, RopeConfig, read_moe, read_routing
from ferrule_plugins.model.mixtral import NAMES


class MiniMaxM2(MoEDecoder):
    naming = Naming(renames=((r"\.block_sparse_moe\.e_score", ".mlp.gate.e_score"), *NAMES))
    config_defaults = {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6}

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, qk_norm="width")

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        return read_moe(ctx, read_routing(ctx, scores="sigmoid", renormalise=True), correction=True)

    def make_rope(self, ctx: BuildContext) -> Rope:
        """Make the rotation. Published files say how many numbers of a head are rotated, and not which part of it."""
        config = RopeConfig.of(ctx.config, self.spec.head_dim)
        turned = ctx.config.get("rotary_dim")
        return Rope(replace(config, partial=int(turned) / config.head_dim) if turned else config)
