"""OPT (Zhang et al. 2022): learned positions that start at 2, layer norms before or (350M) after each block.

The 350M model also has embeddings narrower than its layers, with a projection on either side.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import (
    MLP,
    ROWS,
    Decoder,
    DecoderLayer,
    DecoderSpec,
    Embedding,
    Head,
    LayerNorm,
    Linear,
    Naming,
    Rope,
    Rotation,
    building,
)

_OFFSET = 2  # of the first position in the table


class PostNormLayer(DecoderLayer):
    """A layer that computes norm(x + attention(x)), then norm(x + mlp(x))."""

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None) -> torch.Tensor:
        x = self.input_layernorm(x + self.self_attn(x, ctx, rotation))
        return cast(torch.Tensor, self.post_attention_layernorm(x + self.mlp(x)))


class OPT(Decoder):
    naming = Naming(
        renames=(
            (r"^(model\.)?decoder\.", ""),
            (r"^final_layer_norm\.", "norm."),
            (r"\.self_attn_layer_norm\.", ".input_layernorm."),
            (r"\.final_layer_norm\.", ".post_attention_layernorm."),
            (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.fc1\.", ".mlp.up_proj."),
            (r"\.fc2\.", ".mlp.down_proj."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        bias = bool(c.get("enable_bias", True))
        return DecoderSpec.of(
            ctx,
            num_kv_heads=int(c["num_attention_heads"]),
            inner_size=int(c["ffn_dim"]),
            act=str(c.get("activation_function", "relu")),
            norm_eps=1e-5,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            tied=bool(c.get("tie_word_embeddings", True)),
        )

    def __init__(self, ctx: BuildContext) -> None:
        c = ctx.config
        self.norm_first = bool(c.get("do_layer_norm_before", True))
        self.affine = bool(c.get("layer_norm_elementwise_affine", True))
        super().__init__(ctx)
        spec = self.spec
        if not self.norm_first or c.get("_remove_final_layer_norm"):
            self.norm = nn.Identity()
        width = int(c.get("word_embed_proj_dim") or spec.hidden_size)
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if width != spec.hidden_size:
            with building(ctx):
                self.embed_tokens = Embedding(spec.vocab_size, width, split=ROWS)
                self.project_in = Linear(width, spec.hidden_size)
                self.project_out = Linear(spec.hidden_size, width)
                self.lm_head = Head(width, spec.vocab_size, self.embed_tokens if spec.tied else None)

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        return None

    def make_positions(self, ctx: BuildContext) -> None:
        self.embed_positions = Embedding(int(ctx.config["max_position_embeddings"]) + _OFFSET, self.spec.hidden_size)

    def make_norm(self) -> nn.Module:
        spec = self.spec
        if not self.affine:
            return nn.LayerNorm(spec.hidden_size, spec.norm_eps, elementwise_affine=False)
        return LayerNorm(spec.hidden_size, spec.norm_eps)

    def make_mlp(self, index: int) -> nn.Module:
        spec = self.spec
        return MLP(spec.hidden_size, spec.inner_size, spec.act, spec.mlp_bias)

    def make_layer(self, index: int) -> nn.Module:
        return DecoderLayer(self, index) if self.norm_first else PostNormLayer(self, index)

    def embed(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x: torch.Tensor = self.project_in(super().embed(ids, ctx)) + self.embed_positions(ctx.positions + _OFFSET)
        return x

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return cast(torch.Tensor, self.project_out(super().forward(ids, ctx)))
