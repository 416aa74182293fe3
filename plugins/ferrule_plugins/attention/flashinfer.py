"""`flashinfer`: FlashInfer (Ye et al. 2025), where its package is installed.

Its kernels are planned for each step: which pages a row has goes from the host to the device once, for all layers of
one kind. A step of single tokens uses the package's kernels for decoding, any other those for prefill.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.interfaces.platform import DeviceCaps
from ferrule_plugins.attention.packages import live_table, not_for, not_installed

_DIMS = (64, 128, 256)
_WORKSPACE = 128 << 20  # bytes, as the package's documentation recommends
_TENSOR_CORES = 4  # query heads of a group from which on they pay off in decoding
_IN_FLIGHT = 2  # steps: what one of them was planned with must stay while the next is planned


@dataclass(frozen=True)
class Kind:
    """The properties that layers with the same planned wrapper share."""

    decode: bool
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    scale: float
    window: int
    soft_cap: float


@dataclass
class FlashInferPlan:
    layout: AttentionLayout
    blocks: torch.Tensor  # [tokens] int64, where each token goes
    offsets: torch.Tensor  # [tokens] int64
    page_start: torch.Tensor  # [rows + 1] int32, on the host
    pages: torch.Tensor  # [page_start[-1]] int32, the rows' blocks
    last_page: torch.Tensor  # [rows] int32, on the host: tokens in each row's last page
    wrappers: dict[Kind, Any] = field(default_factory=dict)


class FlashInfer(AttentionBackend):
    """A backend that keeps the package's costly workspace and wrappers; the state of a step is in its plan."""

    conformance = MappingProxyType(
        {"device": "cuda", "platform": "cuda", "dtypes": ("float16", "bfloat16"), "head_dims": _DIMS[:2]}
    )

    def __init__(self) -> None:
        self._wrappers: dict[tuple[Kind, int], Any] = {}
        self._workspace: torch.Tensor | None = None
        self._planned_times: Counter[Kind] = Counter()

    @classmethod
    def refuses(cls, spec: LayerCache, options: AttentionOptions, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        reason = not_for(caps, dtype) or not_installed("flashinfer", "pip install flashinfer-python")
        if reason is not None:
            return reason
        if options.sinks is not None:
            return "has no sinks in all of its kernels"
        if options.alibi_slopes:
            return "knows no slopes but its own"
        if spec.head_dim not in _DIMS:
            return f"takes head sizes of {', '.join(map(str, _DIMS))}, not {spec.head_dim}"
        return None

    def cache_shape(self, spec: LayerCache, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, 2, spec.group.block_size, spec.num_kv_heads, spec.head_dim)

    def plan(self, layout: AttentionLayout) -> FlashInferPlan:
        lengths = np.asarray(layout.context_lens_host, np.int32)
        counts = -(-lengths // layout.block_size)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(starts[-1]) - starts[rows]
        device = layout.block_table.device
        chosen = live_table(layout)[torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)]
        return FlashInferPlan(
            layout=layout,
            blocks=layout.slot_mapping // layout.block_size,
            offsets=layout.slot_mapping % layout.block_size,
            page_start=torch.from_numpy(starts),
            pages=chosen,
            last_page=torch.from_numpy(lengths - (counts - 1) * layout.block_size).int(),
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
        cache[plan.blocks, 0, plan.offsets] = k
        cache[plan.blocks, 1, plan.offsets] = v
        kind = Kind(
            decode=plan.layout.max_query_len == 1,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            dim=q.shape[2],
            dtype=q.dtype,
            scale=options.scale,
            window=options.window or plan.layout.window,
            soft_cap=options.soft_cap,
        )
        if kind not in plan.wrappers:
            plan.wrappers[kind] = self._planned(kind, plan, q.device)
        out: torch.Tensor = plan.wrappers[kind].run(q.contiguous(), cache)
        return out

    def _planned(self, kind: Kind, plan: FlashInferPlan, device: torch.device) -> Any:
        """Return the wrapper of a kind, planned for this step."""
        key = kind, self._planned_times[kind] % _IN_FLIGHT
        self._planned_times[kind] += 1
        if key not in self._wrappers:
            self._wrappers[key] = self._wrapper(kind, device)
        wrapper = self._wrappers[key]
        rows = (plan.page_start, plan.pages, plan.last_page)
        heads = (kind.heads, kind.kv_heads, kind.dim, plan.layout.block_size)
        shared: dict[str, Any] = {
            "sm_scale": kind.scale,
            "window_left": kind.window - 1 if kind.window else -1,
            "logits_soft_cap": kind.soft_cap,
            "q_data_type": kind.dtype,
            "kv_data_type": kind.dtype,
        }
        if kind.decode:
            wrapper.plan(*rows, *heads, **shared)
        else:
            starts = np.concatenate(([0], np.cumsum(plan.layout.query_lens_host))).astype(np.int32)
            wrapper.plan(torch.from_numpy(starts), *rows, *heads, causal=True, **shared)
        return wrapper

    def _wrapper(self, kind: Kind, device: torch.device) -> Any:
        import flashinfer

        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
        if kind.decode:
            tensor_cores = kind.heads // kind.kv_heads >= _TENSOR_CORES
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=tensor_cores)
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
