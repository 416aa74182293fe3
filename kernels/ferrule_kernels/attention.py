"""Attention over gathered keys and values, and the indices to gather them by.

A cache is seen as [slots, 2, kv_heads, head_dim]: slot = block * block_size + offset, keys at 0 and values at 1. Slot 0
lies in the null block, which is never written: what is gathered in place of a masked position is zero, so a neighbour's
infinities cannot come back as 0 * inf.

A cache of latent attention is [slots, 1, kv_heads, head_dim]: values are the first numbers of the keys.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F


class ScoreOptions(Protocol):
    """Options of a layer that change its attention scores. Ferrule's `AttentionOptions` provides them."""

    @property
    def scale(self) -> float: ...

    @property
    def soft_cap(self) -> float: ...  # 0: none

    @property
    def alibi_slopes(self) -> tuple[float, ...]: ...  # one per head, or empty

    @property
    def sinks(self) -> torch.Tensor | None: ...  # [heads], a learned score each


FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}  # caches of 8 bits


def cache_type(name: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the type of a cache's elements that `name` means for a model of `dtype`; None for an unknown name."""
    return dtype if name in ("auto", str(dtype).removeprefix("torch.")) else FP8.get(name)


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round x to `dtype`, the type of a cache's elements: to nearest even.

    For 8-bit types, values out of range become the largest finite one; NaN stays NaN.
    """
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        x = x.clamp(-most, most)
    return x.to(dtype)


def write_cache(cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put k and v [tokens, kv_heads, head_dim] at `slots` [tokens] of cache [slots, 2, kv_heads, head_dim].

    Only k, where the cache has no room for v.
    """
    for side, x in enumerate((k, v)[: cache.shape[1]]):
        entries = narrowed(x, cache.dtype)
        if cache.dtype.itemsize == 1:  # torch copies bytes by an index, but not these types
            cache.view(torch.uint8)[:, side].index_copy_(0, slots, entries.view(torch.uint8))
        else:
            cache[:, side].index_copy_(0, slots, entries)


def read_cache(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Read the entries at `slots` [n] of cache [slots, 1 or 2, kv_heads, head_dim] as `dtype`: [n, …]."""
    return cache.index_select(0, slots).to(dtype)


def kv_slots(
    table: torch.Tensor, first: torch.Tensor, stop: torch.Tensor, span: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots and positions of `span` positions from `first` [rows]; both are [rows, span] int64.

    `table` [rows, blocks] holds block ids. Positions at or after `stop` [rows] get slot 0.
    """
    positions = first.unsqueeze(1) + torch.arange(span, device=table.device)
    inside = positions < stop.unsqueeze(1)
    blocks = (positions // block_size).clamp(max=table.shape[1] - 1)
    slots = torch.gather(table.long(), 1, blocks) * block_size + positions % block_size
    return slots.where(inside, 0), positions


def visible(q_positions: torch.Tensor, k_positions: torch.Tensor, window: int, chunk: int = 0) -> torch.Tensor:
    """Return which keys each query sees, for positions [rows, q] and [rows, k]: bool [rows, q, k].

    `window` includes the query itself; 0 is no limit. With `chunk`, a query sees only keys from the last multiple of
    `chunk` on.
    """
    distance = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)
    seen = distance >= 0
    if window:
        seen = seen & (distance < window)
    return seen & (distance <= (q_positions % chunk).unsqueeze(-1)) if chunk else seen


def attend_math(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    options: ScoreOptions,
    distance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention by its definition, in float32.

    q [rows, heads, q, dim]; k, v [rows, kv_heads, k, dim]; `seen` bool [rows, q, k]; `distance` [rows, q, k] is how far
    a key lies before the query, for ALiBi. Returns [rows, heads, q, dim] of q's type.
    """
    rows, heads, queries, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads * queries, dim).float()
    scores = torch.matmul(grouped, k.float().transpose(-1, -2)) * options.scale
    scores = scores.view(rows, heads, queries, -1)
    if options.soft_cap:
        scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
    if options.alibi_slopes and distance is not None:
        slopes = torch.tensor(options.alibi_slopes, dtype=torch.float32, device=q.device)
        scores = scores - slopes.view(1, -1, 1, 1) * distance.unsqueeze(1)
    scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
    if options.sinks is not None:  # one more key, with a learned score and no value
        sinks = options.sinks.float().view(1, -1, 1, 1).expand(rows, heads, queries, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights.reshape(rows, kv_heads, -1, weights.shape[-1])
    return torch.matmul(weights, v.float()).view(rows, heads, queries, dim).to(q.dtype)


def attend_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute attention with torch's fused kernel, for plain scores (see `is_plain`). Shapes as in `attend_math`."""
    rows, heads, queries, dim = q.shape
    mask = seen.unsqueeze(1)
    if queries == 1:  # the heads of a group are queries of one key head: each key is read once
        grouped = q.reshape(rows, k.shape[1], -1, dim)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        return out.reshape(rows, heads, 1, dim)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=heads != k.shape[1])


def is_plain(options: ScoreOptions) -> bool:
    """Return whether torch's fused kernel can compute these scores."""
    return not (options.soft_cap or options.alibi_slopes or options.sinks is not None)
