"""StarCoder 2 (Lozhkov et al. 2024): layer norms, a plain MLP, biases, and in some sizes a window."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, Naming


class Starcoder2(Decoder):
    config_defaults = {
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
    }
    naming = Naming(
        renames=((r"^model\.", ""), (r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj."))
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        bias = bool(ctx.config["use_bias"])
        return DecoderSpec.of(ctx, norm="layer", gated=False, qkv_bias=bias, out_bias=bias, mlp_bias=bias)
