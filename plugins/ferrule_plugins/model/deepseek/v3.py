"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437), R1, Kimi K2 and GLM-4.7-Flash: V2 with another router."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import MoESpec, read_grouped_routing, read_moe
from ferrule_plugins.model.deepseek.v2 import DeepSeekV2


class DeepSeekV3(DeepSeekV2):
    config_defaults = {
        **DeepSeekV2.config_defaults,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    }

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        return read_moe(ctx, read_grouped_routing(ctx, renormalise=True), correction=True)


class Glm4MoeLite(DeepSeekV3):
    config_defaults = {
        **DeepSeekV3.config_defaults,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
    }
