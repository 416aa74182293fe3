"""ERNIE 4.5 with experts (Baidu 2025): a bias for the choice of experts, neighbours rotated, embeddings tied."""

from __future__ import annotations

from collections.abc import Container

from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec, MoEDecoder, MoESpec, Naming, need, read_moe, read_routing
from ferrule_plugins.model.glm4_moe import NAMES


class Ernie45Moe(MoEDecoder):
    naming = Naming(
        renames=NAMES,
        ignored=(r"\.mtp_",),
        stacked=(  # the bias is [1, experts]
            *Naming.stacked,
            (r"\.moe_statics\.e_score_correction_bias$", ".gate.e_score_correction_bias"),
        ),
    )

    config_defaults = {
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "use_bias": False,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "tie_word_embeddings": True,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        bias = bool(ctx.config["use_bias"])
        return DecoderSpec.of(ctx, qkv_bias=bias, out_bias=bias, mlp_bias=bias, rope_interleaved=True)

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        return read_moe(ctx, read_routing(ctx, renormalise=True), correction=True)

    def describe_sparse(self, ctx: BuildContext) -> Container[int]:
        c = ctx.config
        num_layers, step = int(need(c, "num_hidden_layers")), int(c["moe_layer_interval"])
        first, last = int(c["moe_layer_start_index"]), int(c["moe_layer_end_index"])
        last = num_layers - 1 if last < 0 else last
        return [index for index in range(first, last + 1) if (index + 1) % step == 0]
