"""Self-attention over the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import AttentionOptions, ForwardContext, LayerCache
from ferrule.types import CacheGroup
from ferrule_nn import ops
from ferrule_nn.division import Shared, Split, current_shard, inputs, outputs
from ferrule_nn.linear import Linear, MergedLinear
from ferrule_nn.norm import norm_kernel
from ferrule_nn.rope import Rope, Rotation

_NONE = 1.0, 1.0  # scales of cached keys and values that change nothing


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
    chunk: int = 0  # see `AttentionOptions`
    scale: float | None = None  # default: 1 / sqrt(head_dim)
    soft_cap: float = 0.0
    alibi_slopes: tuple[float, ...] = ()
    qk_norm: Callable[[int], nn.Module] | None = None  # makes the norm of one head's queries, and that of its keys
    norm_width: bool = False  # these norms are over all heads together, not over each
    norm_turned: bool = False  # queries and keys are normed after their rotation, not before
    qkv_clip: float = 0.0  # the largest absolute value of queries, keys and values; 0 is any
    causal: bool = True  # False: each token sees all of its prompt, and nothing is cached
    by_group: bool = False  # a tensor for q, k and v together has each key head's rows in turn: its queries, k, v

    @property
    def split_outputs(self) -> Split | None:
        """Division of the projections to queries, keys and values among ranks; None with norms over all heads."""
        keys = Shared(self.num_kv_heads)
        return None if self.norm_width else outputs(self.num_heads, keys, keys)

    @property
    def split_inputs(self) -> Split | None:
        """Division of the projection from heads to the result among ranks; None with norms over all heads."""
        return None if self.norm_width else inputs(self.num_heads)

    def of_rank(self) -> AttentionSpec:
        """Return the numbers of the heads that the current shard's rank has."""
        shard = current_shard()
        if shard.size == 1 or self.split_outputs is None:
            return self
        heads, keys, _ = self.split_outputs.of(self.num_heads, self.num_kv_heads, self.num_kv_heads).shares(shard.size)
        slopes = self.alibi_slopes[shard.rank * heads :][:heads]
        return replace(self, num_heads=heads, num_kv_heads=keys, alibi_slopes=slopes)

    @property
    def cache(self) -> LayerCache:
        """Cache entries that the layer keeps for each token."""
        window = self.window or self.chunk  # a chunk is at most so long
        group = CacheGroup("sliding" if window else "full", self.block_size, window)
        return LayerCache(group, self.num_kv_heads, self.head_dim)


class HeadScales:
    """Divisors of single heads' cached keys and values, beside the layer's scales: shares of the largest one."""

    def __init__(self, keys: Sequence[float], values: Sequence[float], num_heads: int, device: torch.device) -> None:
        shares = torch.tensor([keys, values], dtype=torch.float64)
        shares = (shares / shares.amax(1, keepdim=True)).clamp(min=2.0**-64).to(device, torch.float32).unsqueeze(-1)
        self._key, self._value = shares.unbind()  # [key heads, 1]
        self._queries, self._results = shares.repeat_interleave(num_heads // len(keys), 1).unbind()  # [heads, 1]

    def cached(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v [tokens, heads, head_dim] scaled for attention over scaled keys and values."""
        return (q * self._queries).to(q.dtype), (k / self._key).to(k.dtype), (v / self._value).to(v.dtype)

    def result(self, out: torch.Tensor) -> torch.Tensor:
        """Return the result of attention over scaled values in true size, [tokens, heads, head_dim]."""
        return (out * self._results).to(out.dtype)


class Attention(nn.Module):
    """Projections q, k, v in one product, rotation, attention, output projection.

    `name` is the layer's name in the cache. The constructor is given the `spec` of the whole layer; the attribute is
    that of this rank's heads. Parameters: `qkv_proj` (merges q_proj, k_proj, v_proj), `o_proj`, and `q_norm`, `k_norm`
    where the model has them.
    """

    def __init__(self, name: str, spec: AttentionSpec, rope: Rope | None = None) -> None:
        super().__init__()
        self.name = name
        self._rope = (rope,)  # in a tuple, so that torch does not register it as a submodule of every layer
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        projections = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        groups = spec.num_kv_heads if spec.by_group else 1
        self.qkv_proj = MergedLinear(
            spec.hidden_size, projections, spec.qkv_bias, groups=groups, split=spec.split_outputs
        )
        self.o_proj = Linear(q_size, spec.hidden_size, spec.out_bias, split=spec.split_inputs)
        self.q_norm = self.make_qk_norm(spec, spec.num_heads)
        self.k_norm = self.make_qk_norm(spec, spec.num_kv_heads)
        self.spec = spec = spec.of_rank()
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.options = AttentionOptions(
            scale=scale,
            window=spec.window,
            chunk=spec.chunk,
            soft_cap=spec.soft_cap,
            alibi_slopes=spec.alibi_slopes,
            causal=spec.causal,
        )
        self._scales = _NONE  # of cached keys and values
        self._head_scales: HeadScales | None = None
        self._kernels = ops.for_layers()
        self._heads: ops.Heads | None = None
        self._cached_heads: ops.CachedHeads | None = None  # `_heads`, where it can write to the cache

    def make_qk_norm(self, spec: AttentionSpec, heads: int) -> nn.Module | None:
        """Make the norm of queries [tokens, heads, head_dim], or that of keys."""
        return spec.qk_norm(heads * spec.head_dim if spec.norm_width else spec.head_dim) if spec.qk_norm else None

    def prepare(self, heads: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Change the projections [tokens, query, key and value heads, head_dim] before norms and rotation."""
        clip = self.spec.qkv_clip
        return heads.clamp_(-clip, clip) if clip else heads

    def pack(self) -> None:
        """Replace norms and rotation by one pass in place, where both are of the usual kinds or absent."""
        spec, rope, kernels = self.spec, self._rope[0], None
        if spec.norm_turned:
            return
        if self.q_norm is not None and self.k_norm is not None:
            kernels = norm_kernel(self.q_norm), norm_kernel(self.k_norm)
        if type(rope) in (Rope, type(None)):
            turned, interleaved = (0, False) if rope is None else (rope.dim, rope.interleaved)
            counts = spec.num_heads, spec.num_kv_heads
            self._heads = ops.heads(self._kernels, counts, spec.head_dim, kernels, turned, interleaved)
            self._cached_heads = self._heads if spec.causal and isinstance(self._heads, ops.CachedHeads) else None

    @property
    def cache(self) -> LayerCache:
        """Cache entries that this layer keeps for each token."""
        return self.spec.cache

    def set_cache_scales(self, key: float, value: float) -> None:
        """See `ferrule.interfaces.model.ScaledCache`."""
        self.options = replace(self.options, scale=self.options.scale / self._scales[0] * key)
        self._scales, self._head_scales = (key, value), None

    def set_head_scales(self, keys: Sequence[float], values: Sequence[float]) -> None:
        """See `ferrule.interfaces.model.HeadScaledCache`."""
        heads = self.spec.num_kv_heads
        if {len(keys), len(values)} != {heads}:
            raise CheckpointError(
                f"The cache's scales of {self.name} are {len(keys)} of keys and {len(values)} of values, "
                f"and it has {heads} heads of each."
            )
        self.set_cache_scales(max(keys), max(values))  # of a head, its own share of the largest
        self._head_scales = HeadScales(keys, values, self.spec.num_heads, ops.weights_device(self))

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None = None) -> torch.Tensor:
        """Map [tokens, hidden] to [tokens, hidden]."""
        return self._projected(self.attend(self.qkv_proj(x), ctx, rotation))

    def attend(self, qkv: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None) -> torch.Tensor:
        """Map [tokens, (query, key and value heads) * head_dim] to [tokens, heads, head_dim]. May overwrite `qkv`."""
        spec, rope = self.spec, self._rope[0]
        heads = self.prepare(qkv.view(qkv.shape[0], -1, spec.head_dim), ctx)
        unscaled = self._scales == _NONE and self._head_scales is None
        if self._heads is not None and self._heads.accepts(heads):
            turn = None if rope is None else rotation
            if self._cached_heads is not None and unscaled:  # with the cache in one pass, if it can be
                q, finish = heads[:, : spec.num_heads], partial(self._cached_heads.write, heads, turn)
                out = ctx.attend_heads(self.name, q, finish, self.options)
                if out is not None:
                    return out
            self._heads(heads, turn)
            q, k, v = heads.split_with_sizes([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        else:
            qk, v = heads.split_with_sizes([spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=1)
            qk = qk if spec.norm_turned else self._normed(qk)
            if rope is not None and rotation is not None:
                qk = rope.rotate(qk, rotation)
            qk = self._normed(qk) if spec.norm_turned else qk
            q, k = qk.split_with_sizes([spec.num_heads, spec.num_kv_heads], dim=1)
        if unscaled:
            return ctx.attend(self.name, q, k, v, self.options)
        key, value = self._scales
        if self._head_scales is None:
            return ctx.attend(self.name, q, k / key, v / value, self.options) * value
        q, k, v = self._head_scales.cached(q, k / key, v / value)
        return self._head_scales.result(ctx.attend(self.name, q, k, v, self.options) * value)

    def _normed(self, qk: torch.Tensor) -> torch.Tensor:
        """Normalise queries and keys [tokens, query and key heads, head_dim]."""
        if self.q_norm is None or self.k_norm is None:
            return qk
        q, k = qk.split_with_sizes([self.spec.num_heads, self.spec.num_kv_heads], dim=1)
        if self.spec.norm_width:
            both = self.q_norm(q.flatten(1)).view(q.shape), self.k_norm(k.flatten(1)).view(k.shape)
        else:
            both = self.q_norm(q), self.k_norm(k)
        return torch.cat(both, dim=1)

    def _projected(self, out: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.o_proj(out.reshape(out.shape[0], -1))
        return y


class GatedAttention(Attention):
    """Attention whose result is multiplied by a gate, sigmoid of a projection that each query head has beside it.

    A checkpoint's `q_proj` has 2 * head_dim rows for each head, those of the query and those of the gate.
    """

    def __init__(self, name: str, spec: AttentionSpec, rope: Rope | None = None) -> None:
        super().__init__(name, spec, rope)
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        projections = {"q_proj": 2 * q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(spec.hidden_size, projections, spec.qkv_bias, split=spec.split_outputs)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None = None) -> torch.Tensor:
        spec = self.spec
        rows = self.qkv_proj(x).view(x.shape[0], -1, spec.head_dim)
        both, kv = rows.split([2 * spec.num_heads, 2 * spec.num_kv_heads], dim=1)
        q, gate = both.unflatten(1, (spec.num_heads, 2)).unbind(2)
        out = self.attend(torch.cat((q, kv), dim=1), ctx, rotation)
        return self._projected(out * gate.sigmoid())
