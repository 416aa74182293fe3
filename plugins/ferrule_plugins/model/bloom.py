"""BLOOM (BigScience 2022): linear biases for positions, a norm after the embedding, merged projections."""

from __future__ import annotations

from dataclasses import replace

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import Decoder, DecoderSpec, Naming, alibi_slopes


class Bloom(Decoder):
    config_names = {"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    config_defaults = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    naming = Naming(
        renames=(
            (r"^transformer\.", ""),
            (r"^word_embeddings\.", "embed_tokens."),
            (r"^word_embeddings_layernorm\.", "embed_norm."),
            (r"^ln_f\.", "norm."),
            (r"^h\.(\d+)\.", r"layers.\1."),
            (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
            (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
            (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        if ctx.config.get("apply_residual_connection_post_layernorm"):
            raise CheckpointError("config.json: 'apply_residual_connection_post_layernorm' is not supported for BLOOM.")
        spec = DecoderSpec.of(
            ctx,
            num_kv_heads=int(ctx.config["num_attention_heads"]),
            inner_size=4 * int(ctx.config["hidden_size"]),
            norm="layer",
            gated=False,
            act="gelu_new",
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            qkv_by_group=True,
        )
        return replace(spec, alibi_slopes=alibi_slopes(spec.num_heads))

    def make_positions(self, ctx: BuildContext) -> None:
        self.embed_norm = self.make_norm()

    def embed(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x: torch.Tensor = self.embed_norm(super().embed(ids, ctx))
        return x
