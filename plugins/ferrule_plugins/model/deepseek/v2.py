"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434): latent attention, small experts, and experts that all tokens use."""

from __future__ import annotations

from torch import nn

from ferrule.interfaces.model import BuildContext
from ferrule_nn import (
    DecoderSpec,
    LatentAttention,
    LatentSpec,
    MoEDecoder,
    MoESpec,
    Naming,
    Rope,
    read_grouped_routing,
    read_moe,
)
from ferrule_plugins.model.glm4_moe import NAMES


class DeepSeekV2(MoEDecoder):
    rope: Rope
    naming = Naming(renames=NAMES)
    config_defaults = {
        "q_lora_rank": 1536,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "rope_interleave": True,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        self.latent = LatentSpec.of(ctx)
        interleaved = bool(ctx.config["rope_interleave"])
        return DecoderSpec.of(
            ctx, num_kv_heads=1, head_dim=self.latent.rope_dim, rope_interleaved=interleaved, windows=()
        )

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        ungrouped = {"groups": 1, "kept_groups": 1} if ctx.config["topk_method"] == "greedy" else {}
        return read_moe(ctx, read_grouped_routing(ctx, scores="softmax", group_depth=1, **ungrouped))

    def make_attention(self, index: int) -> nn.Module:
        return LatentAttention(f"layers.{index}.attn", self.latent, self.rope)
