"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP side by side, rotation of neighbouring features."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, Naming, ParallelLayer, Rope, RopeConfig
from ferrule_plugins.model.gpt2 import GPT_NAMES


class GPTJ(Decoder):
    layer_class = ParallelLayer
    config_names = GPT_NAMES
    config_defaults = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "rotary_dim": 64}
    naming = Naming(
        renames=(
            (r"^transformer\.", ""),
            (r"^wte\.", "embed_tokens."),
            (r"^ln_f\.", "norm."),
            (r"^h\.(\d+)\.", r"layers.\1."),
            (r"\.ln_1\.", ".input_layernorm."),
            (r"\.attn\.out_proj\.", ".attn.o_proj."),
            (r"\.attn\.", ".self_attn."),
            (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
            (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
        ),
        ignored=(r"\.attn\.(masked_)?bias$",),  # causal masks that old files hold
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        return DecoderSpec.of(
            ctx,
            num_kv_heads=int(c["num_attention_heads"]),
            norm="layer",
            gated=False,
            inner_size=int(c.get("n_inner") or 4 * c["hidden_size"]),
            mlp_bias=True,
            head_bias=True,
            rope_interleaved=True,
        )

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        turned = int(ctx.config["rotary_dim"] or self.spec.head_dim)
        return Rope(RopeConfig("default", 10000.0, turned, ctx.max_model_len), self.spec.rope_interleaved)
