"""The blocks of Zamba 2 (Glorioso et al. 2024) that several layers share: attention and an MLP, with adapters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ferrule.interfaces.model import ForwardContext
from ferrule_nn import (
    Attention,
    AttentionSpec,
    DecoderSpec,
    GatedMLP,
    Linear,
    MergedLinear,
    RMSNorm,
    Rope,
    Rotation,
    Shared,
    Split,
    outputs,
)


def adapter(size: int, rank: int, out: int, split: Split) -> nn.Module:
    return nn.Sequential(Linear(size, rank), Linear(rank, out, split=split))


class SharedWeights(nn.Module):
    """The projections of a block's attention, which all uses share, and the adapters of each use."""

    def __init__(self, spec: AttentionSpec, out: int, uses: Iterable[int], rank: int) -> None:
        super().__init__()
        inner, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        projections = {"q_proj": inner, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = MergedLinear(spec.hidden_size, projections, split=spec.split_outputs)
        self.o_proj = Linear(inner, out, split=spec.split_inputs)
        sizes = {"q": (inner, outputs(spec.num_heads)), "kv": (kv, outputs(Shared(spec.num_kv_heads)))}
        self.adapters = nn.ModuleDict(
            {
                f"{part}{use}": adapter(spec.hidden_size, rank, *size)
                for use in (uses if rank else ())
                for parts, size in sizes.items()
                for part in parts
            }
        )


class Zamba2Block(nn.Module):
    """A block mlp(norm(attention(norm([x, embedded])))), for each of `uses`: numbers among the uses of all blocks."""

    def __init__(
        self, spec: DecoderSpec, own: AttentionSpec, rope: Rope | None, rank: int, attention_rank: int, uses: range
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(own.hidden_size, spec.norm_eps)
        self.self_attn = SharedWeights(own, spec.hidden_size, uses, attention_rank)
        self.pre_ff_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.feed_forward = GatedMLP(spec.hidden_size, spec.inner_size, spec.act, spec.mlp_bias)
        both = 2 * spec.inner_size, outputs(0, 0)  # gates, then ups
        self.adapters = nn.ModuleDict({str(use): adapter(spec.hidden_size, rank, *both) for use in uses})
        self.uses = nn.ModuleDict()  # attention with a cache of its own, and the weights of `self_attn`
        for use in uses:
            attention = Attention(f"shared.{use}.attn", own, rope)
            attention.qkv_proj, attention.o_proj = self.self_attn.qkv_proj, self.self_attn.o_proj
            self.uses[str(use)] = attention

    def forward(self, x: torch.Tensor, use: int, ctx: ForwardContext, rotation: Rotation | None) -> torch.Tensor:
        """Apply the block for one use: x [tokens, 2 * hidden] → [tokens, hidden]."""
        y, own, mlp = self.input_layernorm(x), self.self_attn, self.feed_forward
        qkv = own.qkv_proj(y)
        if len(own.adapters):
            qkv = qkv + torch.cat([own.adapters[f"{part}{use}"](y) for part in "qkv"], dim=-1)
        attention: Attention = self.uses[str(use)]  # type: ignore[assignment]
        y = self.pre_ff_layernorm(own.o_proj(attention.attend(qkv, ctx, rotation).flatten(1)))
        out: torch.Tensor = mlp.down_proj(mlp.gated(mlp.gate_up_proj(y) + self.adapters[str(use)](y)))
        return out
