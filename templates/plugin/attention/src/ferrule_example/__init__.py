"""Attention as it is defined, one row after the other. The cache is [blocks, tokens, key and value, heads, size]."""

from __future__ import annotations

from typing import Any

import torch

from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.interfaces.platform import DeviceCaps


class ExampleAttention(AttentionBackend):
    @classmethod
    def refuses(cls, spec: LayerCache, options: AttentionOptions, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        return "it knows neither slopes nor sinks" if options.alibi_slopes or options.sinks is not None else None

    def cache_shape(self, spec: LayerCache, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, spec.group.block_size, 2, spec.num_kv_heads, spec.head_dim)

    def plan(self, layout: AttentionLayout) -> Any:
        """Return, for each row, its queries, the cells of the keys that any of them sees, and [queries, keys] how far
        back each key is.
        """
        rows, start = [], 0
        for row, (count, length) in enumerate(zip(layout.query_lens_host, layout.context_lens_host, strict=True)):
            first = max(0, length - count - layout.window + 1) if layout.window else 0  # cells before it may be others'
            keys = torch.arange(first, length, device=layout.block_table.device)
            cells = layout.block_table[row].long()[keys // layout.block_size] * layout.block_size
            distance = keys[-count:].unsqueeze(1) - keys
            rows.append((slice(start, start + count), cells + keys % layout.block_size, distance))
            start += count
        return rows, layout.slot_mapping

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        options: AttentionOptions,
    ) -> torch.Tensor:
        rows, slots = plan
        flat = cache.flatten(0, 1)  # [cells, 2, kv_heads, head_dim]
        flat[slots] = torch.stack((k, v), 1)
        out = torch.empty_like(q)
        for queries, cells, distance in rows:
            keys, values = flat[cells].float().repeat_interleave(q.shape[1] // k.shape[1], 2).unbind(1)
            scores = torch.einsum("qhd,khd->hqk", q[queries].float(), keys) * options.scale
            if options.soft_cap:
                scores = (scores / options.soft_cap).tanh() * options.soft_cap
            unseen = (distance < 0) | (distance >= (options.window or cache.shape[0] * cache.shape[1]))
            weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
            out[queries] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out
