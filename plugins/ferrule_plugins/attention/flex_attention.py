"""`flex_attention`: torch's own, from a mask and a score function. Compiled on GPUs; on CPUs as it is, for checks.

The rows of a step are one sequence whose tokens see those of their own row only. Keys and values are gathered from the
cache for each layer: for what the kernels proper do not know there is a backend here that is a page long.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.interfaces.platform import DeviceCaps
from ferrule_kernels import attention as kernel

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SMALLEST = 16  # head size that torch's kernel takes on a GPU


@dataclass
class FlexPlan:
    """The row and the position in it, int32, of each query and each gathered key."""

    layout: AttentionLayout
    slots: torch.Tensor  # [keys] int64
    q_rows: torch.Tensor
    q_positions: torch.Tensor
    k_rows: torch.Tensor
    k_positions: torch.Tensor
    masks: dict[int, Any] = field(default_factory=dict)  # torch's BlockMask, by window

    def mask(self, window: int) -> Any:
        """Return the mask, made once for all layers with this window."""
        if window not in self.masks:
            from torch.nn.attention.flex_attention import create_block_mask

            def seen(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
                distance = self.q_positions[q] - self.k_positions[k]
                inside = (self.q_rows[q] == self.k_rows[k]) & (distance >= 0)
                return inside & (distance < window) if window else inside

            queries, keys = len(self.q_rows), len(self.k_rows)
            self.masks[window] = create_block_mask(seen, None, None, queries, keys, device=str(self.q_rows.device))
        return self.masks[window]


class FlexAttention(AttentionBackend):
    def __init__(self) -> None:
        self._compiled = False

    def begin(self, caps: DeviceCaps) -> None:
        """Compile for a GPU, which turns the function into one kernel."""
        self._compiled = "cuda" in caps.features

    @classmethod
    def refuses(cls, spec: LayerCache, options: AttentionOptions, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        if not caps.features & {"cuda", "host_memory"}:
            return f"runs on CPUs and NVIDIA GPUs, not on {caps.platform}"
        if dtype not in _DTYPES:
            return f"computes in float32, float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
        if "cuda" in caps.features and spec.head_dim < _SMALLEST:
            return f"takes head sizes from {_SMALLEST} on, not {spec.head_dim}"
        return None

    @classmethod
    def cache_type(cls, name: str, dtype: torch.dtype) -> torch.dtype | None:
        return kernel.cache_type(name, dtype)

    def cache_shape(self, spec: LayerCache, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, spec.group.block_size, 2, spec.num_kv_heads, spec.head_dim)

    def plan(self, layout: AttentionLayout) -> FlexPlan:
        """Plan a step.

        Keys that a row's window has passed are not gathered: their blocks may belong to others by now.
        """
        counts, lengths = (np.asarray(x, np.int64) for x in (layout.query_lens_host, layout.context_lens_host))
        first = np.maximum(lengths - counts - layout.window + 1, 0) if layout.window else np.zeros_like(lengths)
        q_rows, q_positions = _spread(counts, lengths - counts)
        k_rows, k_positions = _spread(lengths - first, first)
        device = layout.block_table.device
        rows, positions = (torch.from_numpy(x).to(device) for x in (k_rows, k_positions))
        blocks = layout.block_table[rows, positions // layout.block_size].long()
        return FlexPlan(
            layout,
            slots=blocks * layout.block_size + positions % layout.block_size,
            q_rows=torch.from_numpy(q_rows).int().to(device),
            q_positions=torch.from_numpy(q_positions).int().to(device),
            k_rows=rows.int(),
            k_positions=positions.int(),
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        options: AttentionOptions,
    ) -> torch.Tensor:
        from torch.nn.attention.flex_attention import AuxRequest

        flat = cache.flatten(0, 1)
        kernel.write_cache(flat, plan.layout.slot_mapping, k, v)
        entries = kernel.read_cache(flat, plan.slots, q.dtype)  # [keys, 2, kv_heads, dim]
        keys, values = (entries[:, side].transpose(0, 1).unsqueeze(0) for side in (0, 1))
        out, more = _function(self._compiled)(
            q.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            score_mod=_scores(plan, options, q.device),
            block_mask=plan.mask(options.window or plan.layout.window),
            scale=options.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        if options.sinks is not None:  # one more key without a value: all weights shrink by the same factor
            sinks = options.sinks.float().view(1, -1, 1)
            out = (out.float() * torch.sigmoid(more.lse - sinks).unsqueeze(-1)).to(q.dtype)
        heads: torch.Tensor = out[0].transpose(0, 1)
        return heads


def _spread(counts: np.ndarray[Any, Any], firsts: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Return row and position of each of a batch's tokens: `counts` of each row, from position `firsts` on."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + firsts[rows]


def _scores(plan: FlexPlan, options: AttentionOptions, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """Return the function that changes scores; None where nothing does."""
    cap, slopes = options.soft_cap, options.alibi_slopes
    if not cap and not slopes:
        return None
    steep = torch.tensor(slopes, dtype=torch.float32, device=device) if slopes else None

    def change(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        if cap:
            score = torch.tanh(score / cap) * cap
        if steep is not None:
            score = score - steep[head] * (plan.q_positions[q] - plan.k_positions[k])
        return score

    return change


@lru_cache(maxsize=2)
def _function(compiled: bool) -> Callable[..., Any]:
    """Return torch's function, compiled, or as it is without the warning about that."""
    from torch.nn.attention.flex_attention import flex_attention

    if compiled:
        return torch.compile(flex_attention, dynamic=True)

    def plainly(*args: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
            return flex_attention(*args, **options)

    return plainly
