"""Paged attention over a cache [blocks, heads, tokens, key and value side by side]."""

from __future__ import annotations

from typing import Any

import torch

from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.interfaces.platform import DeviceCaps


class AcmePaged(AttentionBackend):
    conformance = {"platform": "acme_npu", "dtypes": ("float32",)}

    @classmethod
    def refuses(cls, spec: LayerCache, options: AttentionOptions, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        if caps.platform != "acme_npu":
            return f"runs on Acme's NPUs only, not on {caps.platform}"
        if options.soft_cap or options.alibi_slopes or options.sinks is not None:
            return "has neither soft caps, nor slopes, nor sinks"
        return None

    def cache_shape(self, spec: LayerCache, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, spec.num_kv_heads, spec.group.block_size, 2 * spec.head_dim)

    def plan(self, layout: AttentionLayout) -> AttentionLayout:
        return layout

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        options: AttentionOptions,
    ) -> torch.Tensor:
        layout: AttentionLayout = plan
        size, dim, window = layout.block_size, q.shape[-1], options.window or layout.window
        cache[layout.slot_mapping // size, :, layout.slot_mapping % size] = torch.cat((k, v), -1)
        out = torch.empty_like(q)
        start = 0
        for row, (count, length) in enumerate(zip(layout.query_lens_host, layout.context_lens_host, strict=True)):
            # What lies before the first query's window is somebody else's by now: it may not even be a number.
            first = max(0, length - count - window + 1) if window else 0
            blocks = layout.block_table[row, first // size : -(-length // size)].long()
            offset = first // size * size
            kept = cache[blocks].transpose(0, 1).flatten(1, 2)[:, first - offset : length - offset]
            kept = kept.repeat_interleave(q.shape[1] // kept.shape[0], 0)
            ours = q[start : start + count].transpose(0, 1)
            distance = torch.arange(length - count, length, device=q.device).unsqueeze(1)
            distance = distance - torch.arange(first, length, device=q.device)
            hidden = (distance < 0) | ((distance >= options.window) if options.window else False)
            scores = (ours @ kept[..., :dim].transpose(1, 2) * options.scale).masked_fill(hidden, float("-inf"))
            out[start : start + count] = (scores.softmax(-1) @ kept[..., dim:]).transpose(0, 1)
            start += count
        return out
