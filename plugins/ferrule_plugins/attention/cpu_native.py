"""`cpu_native`: a kernel of our own that reads the paged cache where it lies; prefill and decode are one call.

It uses the processor's bfloat16 products where there are any (AMX, AVX512-BF16). A row's result has the same bits
alone, in a batch and however its prompt is cut, up to 2048 keys; beyond that, tokens that are computed one at a time
are summed over partitions of the context.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.interfaces.platform import DeviceCaps
from ferrule_kernels import attention as definition
from ferrule_kernels.cpu import attention as kernel
from ferrule_kernels.cpu import library


class CpuNativeAttention(AttentionBackend):
    recordable = ragged = True
    features = frozenset({"latent", "chunk"})

    @classmethod
    def refuses(cls, spec: LayerCache, options: AttentionOptions, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        if "host_memory" not in caps.features:
            return f"runs on CPUs only, not on {caps.platform}"
        if dtype not in kernel.DTYPES:
            return f"computes in bfloat16 and float32, not in {str(dtype).removeprefix('torch.')}"
        sizes = {
            "--block-size": spec.group.block_size,
            "the head size": spec.head_dim,
            "the value size": spec.value_dim,
        }
        for name, size in sizes.items():
            if size % kernel.LANES:
                return f"{name} must be a multiple of {kernel.LANES}, not {size}"
        try:
            library.load()
        except library.KernelsUnavailableError as error:
            return str(error)
        return None

    @classmethod
    def cache_type(cls, name: str, dtype: torch.dtype) -> torch.dtype | None:
        return definition.cache_type(name, dtype)

    def cache_shape(self, spec: LayerCache, num_blocks: int) -> tuple[int, ...]:
        return kernel.cache_shape(
            num_blocks, spec.group.block_size, spec.num_kv_heads, spec.head_dim, spec.value_dim > 0
        )

    def plan(self, layout: AttentionLayout) -> kernel.Rows:
        return kernel.Rows(
            layout.block_table,
            layout.query_start,
            layout.context_lens,
            layout.slot_mapping,
            layout.block_size,
            layout.window,
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
        return kernel.attend(q, k, v, cache, plan, options, options.window or plan.window, options.chunk)
