"""`flash_attn`: FlashAttention (Dao 2023; Shah et al. 2024), where its package is installed.

Version 3, the module `flash_attn_interface`, on Hopper GPUs; version 2, the package `flash-attn`, elsewhere and for
ALiBi. Version 2 reads pages of a multiple of 256 tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.interfaces.platform import DeviceCaps
from ferrule_kernels.attention import write_cache
from ferrule_plugins.attention.packages import live_table, not_for, not_installed

_PAGE = 256  # tokens; version 2's pages are multiples of it
_MAX_DIM = 256
_THIRD, _SECOND = "flash_attn_interface", "flash_attn"


@dataclass(frozen=True)
class FlashPlan:
    layout: AttentionLayout
    table: torch.Tensor  # [rows, blocks] int32
    key_start: torch.Tensor  # [rows + 1] int32, the sum of the contexts before each row


class FlashAttention(AttentionBackend):
    conformance = MappingProxyType(
        {
            "device": "cuda",
            "platform": "cuda",
            "dtypes": ("float16", "bfloat16"),
            "block_sizes": (16, 256),
            "head_dims": (64, 128),
        }
    )

    @classmethod
    def refuses(cls, spec: LayerCache, options: AttentionOptions, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        reason = not_for(caps, dtype)
        if reason is not None:
            return reason
        if options.sinks is not None:
            return "has no sinks"
        if spec.head_dim % 8 or spec.head_dim > _MAX_DIM:
            return f"takes head sizes that are multiples of 8, up to {_MAX_DIM}, not {spec.head_dim}"
        if _third(options, caps):
            return None
        missing = not_installed(_SECOND, "pip install flash-attn --no-build-isolation")
        if missing is not None:
            return missing
        if spec.group.block_size % _PAGE:
            return f"--block-size must be a multiple of {_PAGE} for version 2, not {spec.group.block_size}"
        return None

    def cache_shape(self, spec: LayerCache, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, spec.group.block_size, 2, spec.num_kv_heads, spec.head_dim)

    def plan(self, layout: AttentionLayout) -> FlashPlan:
        ends = torch.cumsum(layout.context_lens, 0, dtype=torch.int32)
        return FlashPlan(layout, live_table(layout), torch.nn.functional.pad(ends, (1, 0)))

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        options: AttentionOptions,
    ) -> torch.Tensor:
        layout: AttentionLayout = plan.layout
        write_cache(cache.flatten(0, 1), layout.slot_mapping, k, v)
        window = options.window or layout.window
        shared: dict[str, Any] = {
            "softmax_scale": options.scale,
            "causal": True,
            "window_size": (window - 1, 0) if window else (-1, -1),
            "softcap": options.soft_cap,
        }
        keys, values = cache[:, :, 0], cache[:, :, 1]
        if not options.alibi_slopes and not_installed(_THIRD, "") is None and _hopper(q.device):
            return _with_cache(q, keys, values, plan, shared)
        return _varlen(q, keys, values, plan, shared, options.alibi_slopes)


def _third(options: AttentionOptions, caps: DeviceCaps) -> bool:
    """Return whether version 3 is installed and supports this layer."""
    return not_installed(_THIRD, "") is None and "sm90" in caps.features and not options.alibi_slopes


def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _with_cache(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: FlashPlan, shared: dict[str, Any]
) -> torch.Tensor:
    from flash_attn_interface import flash_attn_with_kvcache

    out: torch.Tensor = flash_attn_with_kvcache(
        q,
        keys,
        values,
        cache_seqlens=plan.layout.context_lens,
        page_table=plan.table,
        cu_seqlens_q=plan.layout.query_start,
        max_seqlen_q=plan.layout.max_query_len,
        **shared,
    )
    return out


def _varlen(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: FlashPlan,
    shared: dict[str, Any],
    slopes: tuple[float, ...],
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    attend: Callable[..., torch.Tensor] = flash_attn_varlen_func
    return attend(
        q,
        keys,
        values,
        cu_seqlens_q=plan.layout.query_start,
        cu_seqlens_k=plan.key_start,
        max_seqlen_q=plan.layout.max_query_len,
        max_seqlen_k=plan.layout.max_context_len,
        alibi_slopes=torch.tensor(slopes, dtype=torch.float32, device=q.device) if slopes else None,
        block_table=plan.table,
        **shared,
    )
