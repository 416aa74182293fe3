"""`triton`: kernels of our own for NVIDIA GPUs. One kind of batch, every option, caches of 8 bits, CUDA graphs.

A row's result has the same bits in any batch. Needs nothing but torch and the Triton that comes with it; on a CPU it
runs under Triton's interpreter, for tests.
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
from ferrule_kernels import attention as reference
from ferrule_kernels import cuda

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_DIM = 256
_FP8_SINCE = (8, 9)  # compute capability: before it, Triton has no conversions


@dataclass(frozen=True)
class TritonPlan:
    batch: Any  # ferrule_kernels.cuda.attention.Batch
    slots: torch.Tensor
    window: int


class TritonAttention(AttentionBackend):
    recordable = True
    conformance = MappingProxyType(
        {"device": "cuda", "platform": "cuda", "block_sizes": (1, 4, 16, 128), "head_dims": (8, 16, 64, 80, 256)}
    )

    def __init__(self) -> None:
        from ferrule_kernels.cuda import attention, rope_cache

        self._kernels = attention
        self._write = rope_cache.write_cache

    @classmethod
    def refuses(cls, spec: LayerCache, options: AttentionOptions, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        if not caps.features & {"cuda", "triton", "host_memory"}:
            return f"runs on NVIDIA GPUs only, not on {caps.platform}"
        if dtype not in _DTYPES:
            return f"computes in float32, float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
        if not 1 <= spec.head_dim <= _MAX_DIM:
            return f"takes head sizes up to {_MAX_DIM}, not {spec.head_dim}"
        if "triton" in caps.features:
            return None
        if "host_memory" in caps.features and torch.cuda.is_available():
            return "runs on NVIDIA GPUs; on a CPU it needs Triton's interpreter, which needs the GPUs to be hidden"
        return cuda.available()

    @classmethod
    def cache_type(cls, name: str, dtype: torch.dtype) -> torch.dtype | None:
        kind = reference.cache_type(name, dtype)
        if kind is not None and kind.itemsize == 1 and torch.cuda.is_available():
            return kind if torch.cuda.get_device_capability() >= _FP8_SINCE else None
        return kind

    def cache_shape(self, spec: LayerCache, num_blocks: int) -> tuple[int, ...]:
        return self._kernels.cache_shape(num_blocks, spec.group.block_size, spec.num_kv_heads, spec.head_dim)

    def plan(self, layout: AttentionLayout) -> TritonPlan:
        short, has_long = self._kernels.Batch.kinds(layout.query_lens_host, layout.max_query_len)
        batch = self._kernels.Batch(
            query_start=layout.query_start,
            context_lens=layout.context_lens,
            block_table=layout.block_table,
            block_size=layout.block_size,
            max_context_len=layout.max_context_len,
            short_queries=short,
            has_long=has_long,
        )
        return TritonPlan(batch, layout.slot_mapping, layout.window)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        options: AttentionOptions,
    ) -> torch.Tensor:
        self._write(cache, plan.slots, k, v)
        return self._kernels.attend(q, cache, plan.batch, options, options.window or plan.window)

    def run_heads(
        self, q: torch.Tensor, write: Callable[..., None], cache: torch.Tensor, plan: Any, options: AttentionOptions
    ) -> torch.Tensor:
        write(cache, plan.slots)
        return self._kernels.attend(q, cache, plan.batch, options, options.window or plan.window)
