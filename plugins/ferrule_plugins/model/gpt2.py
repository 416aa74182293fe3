"""GPT-2 (Radford et al. 2019): learned positions, layer norms, a plain MLP; matrices stored [in, out]."""

from __future__ import annotations

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import MLP, Attention, Decoder, DecoderSpec, Embedding, LayerNorm, Naming, Rope


class GPT2(Decoder):
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
        hidden = int(c.get("n_embd") or c["hidden_size"])
        return DecoderSpec.of(
            ctx,
            num_kv_heads=int(c.get("n_head") or c["num_attention_heads"]),
            inner_size=int(c.get("n_inner") or 4 * hidden),
            norm_eps=float(c.get("layer_norm_epsilon", 1e-5)),
            act=str(c.get("activation_function", "gelu_new")),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            tied=bool(c.get("tie_word_embeddings", True)),
            attention_scale=None if c.get("scale_attn_weights", True) else 1.0,
        )

    def __init__(self, ctx: BuildContext) -> None:
        self.scale_by_depth = bool(ctx.config.get("scale_attn_by_inverse_layer_idx"))
        super().__init__(ctx)

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        return None

    def make_positions(self, ctx: BuildContext) -> None:
        count = int(ctx.config.get("n_positions") or ctx.config["max_position_embeddings"])
        self.embed_positions = Embedding(count, self.spec.hidden_size)

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.spec.hidden_size, self.spec.norm_eps)

    def make_attention(self, index: int) -> nn.Module:
        spec = self.spec.attention(index)
        if self.scale_by_depth:
            scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
            spec = self.spec.attention(index, scale=scale / (index + 1))
        return Attention(f"layers.{index}.attn", spec)

    def make_mlp(self, index: int) -> nn.Module:
        return MLP(self.spec.hidden_size, self.spec.inner_size, self.spec.act)

    def embed(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x: torch.Tensor = super().embed(ids, ctx) + self.embed_positions(ctx.positions)
        return x
