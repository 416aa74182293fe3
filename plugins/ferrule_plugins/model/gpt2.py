"""GPT-2 (Radford et al. 2019): learned positions, layer norms, a plain MLP; matrices stored [in, out]."""

from __future__ import annotations

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import Attention, Decoder, DecoderSpec, Embedding, Naming, Rope

GPT_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


class GPT2(Decoder):
    config_names = GPT_NAMES
    config_defaults = {
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    }
    naming = Naming(
        renames=(
            (r"^transformer\.", ""),
            (r"^wte\.", "embed_tokens."),
            (r"^wpe\.", "embed_positions."),
            (r"^ln_f\.", "norm."),
            (r"^h\.(\d+)\.", r"layers.\1."),
            (r"\.ln_1\.", ".input_layernorm."),
            (r"\.ln_2\.", ".post_attention_layernorm."),
            (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
            (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
            (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
            (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
        ),
        ignored=(r"\.attn\.(masked_)?bias$",),  # causal masks that old files hold
        transposed=(r"\.c_(attn|proj|fc)\.weight$",),
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        if c.get("add_cross_attention"):
            raise CheckpointError("config.json: 'add_cross_attention' makes this GPT-2 a decoder of another model.")
        return DecoderSpec.of(
            ctx,
            num_kv_heads=int(c["num_attention_heads"]),
            inner_size=int(c.get("n_inner") or 4 * c["hidden_size"]),
            norm="layer",
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            attention_scale=None if c["scale_attn_weights"] else 1.0,
        )

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        return None

    def make_positions(self, ctx: BuildContext) -> None:
        self.embed_positions = Embedding(int(ctx.config["max_position_embeddings"]), self.spec.hidden_size)

    def make_attention(self, index: int) -> nn.Module:
        spec = self.spec.attention(index)
        if self.config.get("scale_attn_by_inverse_layer_idx"):
            scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
            spec = self.spec.attention(index, scale=scale / (index + 1))
        return Attention(f"layers.{index}.attn", spec)

    def embed(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x: torch.Tensor = super().embed(ids, ctx) + self.embed_positions(ctx.positions)
        return x
