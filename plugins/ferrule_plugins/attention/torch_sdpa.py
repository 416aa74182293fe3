"""`torch_sdpa`: the reference. Row by row, in the plainest way; runs wherever torch does."""

from __future__ import annotations

from typing import Any

import torch

from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.interfaces.platform import DeviceCaps
from ferrule_kernels import attention as kernel


class TorchSDPA(AttentionBackend):
    """A backend that gathers each row's keys and values through its block table."""

    features = frozenset({"latent", "chunk", "bidirectional"})

    @classmethod
    def refuses(cls, spec: LayerCache, options: AttentionOptions, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        return None

    @classmethod
    def cache_type(cls, name: str, dtype: torch.dtype) -> torch.dtype | None:
        return kernel.cache_type(name, dtype)

    def cache_shape(self, spec: LayerCache, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, spec.group.block_size, 1 if spec.value_dim else 2, spec.num_kv_heads, spec.head_dim)

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
        flat = cache.flatten(0, 1)
        kernel.write_cache(flat, layout.slot_mapping, k, v)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        start = 0
        for row, (count, length) in enumerate(zip(layout.query_lens_host, layout.context_lens_host, strict=True)):
            result = self._row(q[start : start + count], flat, layout, row, length, options)
            out[start : start + count] = result[..., : v.shape[2]]  # where values are a part of the keys
            start += count
        return out

    def run_uncached(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        query_start: torch.Tensor,
        query_lens: tuple[int, ...],
        options: AttentionOptions,
    ) -> torch.Tensor:
        rows = zip(*(each.split_with_sizes(query_lens) for each in (q, k, v)), strict=True)
        return torch.cat([self._whole(q, k, v, options) for q, k, v in rows])

    def _whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Attend from each of a row's tokens to all of them."""
        queries, keys, values = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        positions = torch.arange(len(q), device=q.device)
        distance = (positions.unsqueeze(-1) - positions).abs().unsqueeze(0)
        return self._attended(queries, keys, values, distance >= 0, distance, options)

    def _row(
        self,
        q: torch.Tensor,
        flat: torch.Tensor,
        layout: AttentionLayout,
        row: int,
        length: int,
        options: AttentionOptions,
    ) -> torch.Tensor:
        device = q.device
        q_positions = torch.arange(length - q.shape[0], length, device=device).unsqueeze(0)
        window = options.window or layout.window
        first = max(0, length - q.shape[0] - window + 1) if window else 0
        bounds = torch.tensor([[first], [length]], device=device)
        slots, positions = kernel.kv_slots(
            layout.block_table[row : row + 1], bounds[0], bounds[1], length - first, layout.block_size
        )
        gathered = kernel.read_cache(flat, slots[0], q.dtype)  # [keys, 1 or 2, kv_heads, dim]
        keys, values = (gathered[:, side].transpose(0, 1).unsqueeze(0) for side in (0, -1))
        seen = kernel.visible(q_positions, positions, options.window, options.chunk)
        queries = q.transpose(0, 1).unsqueeze(0)
        distance = q_positions.unsqueeze(-1) - positions.unsqueeze(-2)
        return self._attended(queries, keys, values, seen, distance, options)

    def _attended(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seen: torch.Tensor,
        distance: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend by torch's fused kernel where it can: [tokens, heads, dim].

        Shapes as in `attend_math`, with one row.
        """
        if kernel.is_plain(options):
            out = kernel.attend_sdpa(q, k, v, seen, options.scale)
        else:
            out = kernel.attend_math(q, k, v, seen, options, distance)
        return out[0].transpose(0, 1)
