"""Zamba 2 (Glorioso et al. 2024): Mamba-2 layers; before some of them a shared block attends.

There are `num_mem_blocks` such blocks, used in turn. Each use of a block has a cache of its own, and low-rank additions
to the block's projections, its adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import (
    AttentionSpec,
    Decoder,
    DecoderSpec,
    Linear,
    Mamba2Mixer,
    Mamba2Spec,
    Naming,
    Rope,
    RopeConfig,
    need,
)
from ferrule_plugins.model.zamba2.block import Zamba2Block


class Zamba2Layer(nn.Module):
    """A layer that computes x + mamba(norm(x + linear(block(x)))), where there is a block."""

    def __init__(self, owner: Zamba2, index: int) -> None:
        super().__init__()
        self.input_layernorm = owner.make_norm()
        self.mamba = Mamba2Mixer(f"layers.{index}.mamba", owner.mamba)
        self.linear = Linear(owner.spec.hidden_size, owner.spec.hidden_size) if index in owner.hybrid else None


class Zamba2(Decoder):
    naming = Naming(
        renames=(
            (r"^model\.", ""),
            (r"^final_layernorm\.", "norm."),
            (r"\.mamba_decoder\.", "."),
            (r"\.linear_([qkv])_adapter_list\.(\d+)\.", r".adapters.\1\2."),
            (r"\.feed_forward\.gate_up_proj_adapter_list\.", ".adapters."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        hidden, heads = int(need(c, "hidden_size")), int(need(c, "num_attention_heads"))
        bias = bool(c.get("add_bias_linear", False))
        self.hybrid = [index for index, kind in enumerate(need(c, "layers_block_type")) if kind == "hybrid"]
        self.num_blocks = int(c.get("num_mem_blocks") or 1)
        self.rank = int(c.get("adapter_rank", 128))
        self.attention_rank = self.rank if c.get("use_shared_attention_adapter") else 0
        self.rotates = bool(c.get("use_mem_rope", False))
        self.mamba = Mamba2Spec.of(c, bias=bias, out_bias=bias, conv_bias=True, act="silu", norm_eps=1e-5)
        head_dim = 2 * hidden // heads
        self.shared = AttentionSpec(
            hidden_size=2 * hidden,
            num_heads=heads,
            num_kv_heads=int(c.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            block_size=ctx.block_size,
            scale=(head_dim / 2) ** -0.5,
        )
        return DecoderSpec.of(
            ctx,
            inner_size=int(c.get("intermediate_size") or 4 * hidden),
            head_dim=head_dim,
            norm_eps=float(c.get("rms_norm_eps", 1e-5)),
            act=str(c.get("hidden_act", "gelu")),
            mlp_bias=bias,
            tied=bool(c.get("tie_word_embeddings", True)),
        )

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        return Rope(RopeConfig.of(ctx.config, self.spec.head_dim)) if self.rotates else None

    def make_positions(self, ctx: BuildContext) -> None:
        uses = len(self.hybrid)
        block = partial(Zamba2Block, self.spec, self.shared, self.rope, self.rank, self.attention_rank)
        self.blocks = nn.ModuleList(
            block(range(first, uses, self.num_blocks)) for first in range(min(self.num_blocks, uses))
        )

    def make_layer(self, index: int) -> nn.Module:
        return Zamba2Layer(self, index)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the weights. A block's weights are named after the first layer that uses it, and perhaps after others
        again.
        """

        def renamed() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                found = re.match(r"(?:model\.)?layers\.(\d+)\.shared_transformer\.(.*)", name)
                use = self.hybrid.index(int(found[1])) if found and int(found[1]) in self.hybrid else 0
                if use < self.num_blocks:
                    yield (f"blocks.{use}.{found[2]}" if found else name), tensor

        return super().load_weights(renamed())

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x = embedded = self.embed(ids, ctx)
        rotation = self.rope.at(ctx, x.dtype) if self.rope is not None else None
        layers: list[Any] = list(self.layers)
        for index, layer in enumerate(layers):
            y = x
            if layer.linear is not None:
                use = self.hybrid.index(index)
                block = self.blocks[use % self.num_blocks]
                y = x + layer.linear(block(torch.cat((x, embedded), dim=-1), use, ctx, rotation))
            x = x + layer.mamba(layer.input_layernorm(y), ctx)
        hidden: torch.Tensor = self.norm(x)
        return hidden
