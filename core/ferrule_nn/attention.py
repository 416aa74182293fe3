"""Self-attention over the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ferrule.interfaces.model import AttentionOptions, ForwardContext, LayerCache
from ferrule.types import CacheGroup
from ferrule_nn import ops
from ferrule_nn.linear import Linear, MergedLinear
from ferrule_nn.norm import norm_kernel
from ferrule_nn.rope import Rope, Rotation


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The numbers of one attention layer. `window` counts tokens, the query's own included; 0 is all."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    qkv_bias: bool = False
    out_bias: bool = False
    window: int = 0
    scale: float | None = None  # default: 1 / sqrt(head_dim)
    soft_cap: float = 0.0
    alibi_slopes: tuple[float, ...] = ()
    qk_norm: Callable[[int], nn.Module] | None = None  # makes the norm of one head's queries, and that of its keys


class Attention(nn.Module):
    """Projections q, k, v in one product, rotation, attention, output projection.

    `name` is the layer's name in the cache. Parameters: `qkv_proj` (merges q_proj, k_proj, v_proj), `o_proj`, and
    `q_norm`, `k_norm` where the model has them.
    """

    def __init__(self, name: str, spec: AttentionSpec, rope: Rope | None = None) -> None:
        super().__init__()
        self.name = name
        self.spec = spec
        self._rope = (rope,)  # in a tuple, so that torch does not register it as a submodule of every layer
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        projections = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(spec.hidden_size, projections, spec.qkv_bias)
        self.o_proj = Linear(q_size, spec.hidden_size, spec.out_bias)
        self.q_norm = spec.qk_norm(spec.head_dim) if spec.qk_norm else None
        self.k_norm = spec.qk_norm(spec.head_dim) if spec.qk_norm else None
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.options = AttentionOptions(
            scale=scale, window=spec.window, soft_cap=spec.soft_cap, alibi_slopes=spec.alibi_slopes
        )
        self._heads: ops.Heads | None = None
        self._cached_heads: ops.CachedHeads | None = None  # `_heads`, where it can write to the cache

    def pack(self) -> None:
        """Norms and rotation become one pass in place, where both are of the usual kinds or absent."""
        spec, rope, kernels = self.spec, self._rope[0], None
        if self.q_norm is not None and self.k_norm is not None:
            kernels = norm_kernel(self.q_norm), norm_kernel(self.k_norm)
        if type(rope) in (Rope, type(None)):
            turned, interleaved = (0, False) if rope is None else (rope.dim, rope.interleaved)
            counts = spec.num_heads, spec.num_kv_heads
            self._heads = ops.heads(ops.weights_device(self), counts, spec.head_dim, kernels, turned, interleaved)
            self._cached_heads = self._heads if isinstance(self._heads, ops.CachedHeads) else None

    @property
    def cache(self) -> LayerCache:
        """What this layer keeps for each token."""
        spec = self.spec
        group = CacheGroup("sliding" if spec.window else "full", spec.block_size, spec.window)
        return LayerCache(group, spec.num_kv_heads, spec.head_dim)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None = None) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        spec, rope = self.spec, self._rope[0]
        heads = self.qkv_proj(x).view(x.shape[0], -1, spec.head_dim)
        if self._heads is not None and self._heads.accepts(heads):
            turn = None if rope is None else rotation
            if self._cached_heads is not None:  # norms, rotation and the cache in one pass, if the backend can
                q, finish = heads[:, : spec.num_heads], partial(self._cached_heads.write, heads, turn)
                out = ctx.attend_heads(self.name, q, finish, self.options)
                if out is not None:
                    return self._projected(out)
            self._heads(heads, turn)
            q, k, v = heads.split_with_sizes([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        else:
            qk, v = heads.split([spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=1)
            if self.q_norm is not None and self.k_norm is not None:
                q, k = qk.split([spec.num_heads, spec.num_kv_heads], dim=1)
                qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
            if rope is not None and rotation is not None:
                qk = rope.rotate(qk, rotation)
            q, k = qk.split([spec.num_heads, spec.num_kv_heads], dim=1)
        return self._projected(ctx.attend(self.name, q, k, v, self.options))

    def _projected(self, out: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.o_proj(out.reshape(out.shape[0], -1))
        return y
