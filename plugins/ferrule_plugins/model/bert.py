"""BERT (Devlin et al. 2019): an encoder, whose tokens see all of their text. It gives vectors and generates nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ferrule.checkpoint import completed
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext, ForwardContext, LayerCache, Model, PoolRow, Pools
from ferrule_nn import (
    MLP,
    Attention,
    AttentionSpec,
    Embedding,
    LayerNorm,
    Naming,
    Pooler,
    building,
    load_into,
    need,
)


class BertLayer(nn.Module):
    """A layer that computes norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, name: str, attention: AttentionSpec, inner_size: int, act: str, eps: float) -> None:
        super().__init__()
        self.self_attn = Attention(name, attention)
        self.attention_norm = LayerNorm(attention.hidden_size, eps)
        self.mlp = MLP(attention.hidden_size, inner_size, act)
        self.output_norm = LayerNorm(attention.hidden_size, eps)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x = self.attention_norm(x + self.self_attn(x, ctx))
        y: torch.Tensor = self.output_norm(x + self.mlp(x))
        return y


class Bert(nn.Module, Model, Pools):
    """Embeddings of tokens, positions and the first type of text, then layers with their norms at the end.

    The dense layer that predicts the next sentence from the first token is not part of a vector and is not loaded.
    """

    splits_prompts = False
    config_defaults = {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "type_vocab_size": 2}
    naming = Naming(
        renames=(
            (r"^bert\.", ""),
            (r"^embeddings\.word_embeddings\.", "embed_tokens."),
            (r"^embeddings\.position_embeddings\.", "embed_positions."),
            (r"^embeddings\.token_type_embeddings\.", "embed_types."),
            (r"^embeddings\.LayerNorm\.", "embed_norm."),
            (r"^encoder\.layer\.", "layers."),
            (r"\.attention\.self\.(q|k|v)(uery|ey|alue)\.", r".self_attn.\1_proj."),
            (r"\.attention\.output\.dense\.", ".self_attn.o_proj."),
            (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
            (r"\.intermediate\.dense\.", ".mlp.up_proj."),
            (r"\.output\.dense\.", ".mlp.down_proj."),
            (r"\.output\.LayerNorm\.", ".output_norm."),
        ),
        ignored=(r"^(bert\.)?pooler\.", r"^(bert\.)?embeddings\.position_ids$", r"^cls\."),
    )

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        c = completed(ctx.config, self.config_names, self.config_defaults)
        if c.get("is_decoder"):
            raise CheckpointError("config.json: 'is_decoder' makes this BERT a decoder.")
        if c.get("position_embedding_type", "absolute") != "absolute":
            raise CheckpointError("config.json: only 'position_embedding_type' absolute is served.")
        hidden, heads, eps = (
            int(need(c, "hidden_size")),
            int(need(c, "num_attention_heads")),
            float(c["layer_norm_eps"]),
        )
        if hidden % heads:
            raise CheckpointError(
                f"config.json: 'hidden_size' {hidden} is not a multiple of 'num_attention_heads' {heads}."
            )
        attention = AttentionSpec(
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            block_size=ctx.block_size,
            qkv_bias=True,
            out_bias=True,
            causal=False,
        )
        inner, act, eps = int(need(c, "intermediate_size")), str(c["hidden_act"]), float(c["layer_norm_eps"])
        with building(ctx):
            self.embed_tokens = Embedding(int(need(c, "vocab_size")), hidden)
            self.embed_positions = Embedding(int(need(c, "max_position_embeddings")), hidden)
            self.embed_types = Embedding(int(c["type_vocab_size"]), hidden)
            self.embed_norm = LayerNorm(hidden, eps)
            self.layers = nn.ModuleList(
                BertLayer(f"layers.{index}.attn", attention, inner, act, eps)
                for index in range(int(need(c, "num_hidden_layers")))
            )
        self._pooler = Pooler(ctx.pooling, "cls")

    def cache_specs(self) -> dict[str, LayerCache]:
        return {}

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        types = self.embed_types(torch.zeros_like(ids))
        x = self.embed_norm(self.embed_tokens(ids) + self.embed_positions(ctx.positions) + types)
        for layer in self.layers:
            x = layer(x, ctx)
        hidden: torch.Tensor = x
        return hidden

    def pool(self, hidden: torch.Tensor, rows: Sequence[PoolRow]) -> torch.Tensor:
        return self._pooler(hidden, rows)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_into(self, weights, self.naming)
