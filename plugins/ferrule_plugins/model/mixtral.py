"""Mixtral (Jiang et al. 2024): Mistral with experts in the place of each feed-forward block."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import MoEDecoder, MoESpec, Naming, read_moe, read_routing

NAMES = (
    (r"^model\.", ""),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)


class Mixtral(MoEDecoder):
    naming = Naming(renames=NAMES)
    config_defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        return read_moe(ctx, read_routing(ctx, renormalise=True))
