"""FlashInfer as a backend, against wrappers that compute what its documentation says."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.interfaces.platform import DeviceCaps
from ferrule.types import CacheGroup
from ferrule_plugins.attention import flashinfer as backend
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.kits import AttentionKit
from ferrule_testkit.kits.attention import layout_of

GPU = fake_caps("cuda", {"sm90"})


class Wrapper:
    """The common part of both wrappers: rows of pages in the layout NHD, [pages, 2, page_size, kv_heads, dim]."""

    made: ClassVar[int] = 0

    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        type(self).made += 1

    def keep(self, qo_indptr: Any, indptr: Any, indices: Any, last: Any, heads: tuple[int, ...], more: Any) -> None:
        assert {x.dtype for x in (qo_indptr, indptr, indices, last)} == {torch.int32}
        assert len(indices) == indptr[-1]
        assert bool(((last >= 1) & (last <= heads[3])).all())
        self.rows, self.heads, self.more = (qo_indptr.tolist(), indptr.tolist(), indices, last.tolist()), heads, more

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        starts, pages, indices, last = self.rows
        heads, kv_heads, dim, page_size = self.heads
        assert q.shape == (starts[-1], heads, dim)
        assert paged_kv_cache.shape[1:] == (2, page_size, kv_heads, dim)
        assert q.dtype == self.more["q_data_type"]
        out = []
        for row, left in enumerate(last):
            own = indices[pages[row] : pages[row + 1]].long()
            length = (len(own) - 1) * page_size + left
            k, v = (paged_kv_cache[own, side].flatten(0, 1)[:length] for side in (0, 1))
            out.append(self.row(q[starts[row] : starts[row + 1]], k, v))
        return torch.cat(out)

    def row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).float() for x in (k, v))
        scores, cap = torch.einsum("qhd,khd->hqk", q.float(), k) * self.more["sm_scale"], self.more["logits_soft_cap"]
        if cap > 0:
            scores = cap * torch.tanh(scores / cap)
        distance = torch.arange(q.shape[0]).unsqueeze(1) + k.shape[0] - q.shape[0] - torch.arange(k.shape[0])
        seen = distance >= 0
        if self.more["window_left"] >= 0:
            seen = seen & (distance <= self.more["window_left"])
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).to(q.dtype)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        assert causal
        more = {"sm_scale": sm_scale, "window_left": window_left, "logits_soft_cap": logits_soft_cap}
        more["q_data_type"] = q_data_type
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.keep(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, heads, more)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, sm_scale=None,
        window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        more = {"sm_scale": sm_scale, "window_left": window_left, "logits_soft_cap": logits_soft_cap}
        more["q_data_type"] = q_data_type
        starts = torch.arange(len(indptr), dtype=torch.int32)
        self.keep(starts, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim, page_size), more)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
        setattr(module, wrapper.__name__, wrapper)
        monkeypatch.setattr(wrapper, "made", 0)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(backend, "_WORKSPACE", 1024)


@pytest.mark.usefixtures("_installed")
class TestConformance(AttentionKit):
    plugin = backend.FlashInfer
    platform = "cuda"
    device = "cpu"
    dtypes = ("float16", "bfloat16")
    head_dims = (64,)


@pytest.mark.usefixtures("_installed")
def test_a_step_is_planned_once_for_layers_of_a_kind() -> None:
    attention, options = backend.FlashInfer(), AttentionOptions(scale=0.1)
    cache = torch.zeros(attention.cache_shape(LayerCache(CacheGroup("full", 4), 1, 64), 8), dtype=torch.float16)
    q, kv = torch.zeros(2, 2, 64, dtype=torch.float16), torch.zeros(2, 1, 64, dtype=torch.float16)
    used = []
    for _ in range(4):
        plan = attention.plan(layout_of([(1, 3), (1, 9)], 4))
        for _ in range(3):
            attention.run(q, kv, kv, cache, plan, options)
        used += plan.wrappers.values()
    assert len(used) == 4
    assert used[0] is used[2] is not used[1]  # what a step in flight was planned with stays as it is
    assert BatchDecodeWithPagedKVCacheWrapper.made == 2


def refuses(caps: DeviceCaps = GPU, dtype: torch.dtype = torch.bfloat16, dim: int = 128, **more: Any) -> str | None:
    spec = LayerCache(CacheGroup("full", 16), 2, dim)
    return backend.FlashInfer.refuses(spec, AttentionOptions(scale=1.0, **more), caps, dtype)


def test_a_package_that_is_missing_is_named() -> None:
    assert refuses() == "the package flashinfer is not installed (pip install flashinfer-python)"


@pytest.mark.usefixtures("_installed")
def test_what_is_refused() -> None:
    assert refuses() is None
    for said, reason in (
        ("not on cpu", refuses(fake_caps())),
        ("not in float32", refuses(dtype=torch.float32)),
        ("no sinks", refuses(sinks=torch.zeros(4))),
        ("no slopes", refuses(alibi_slopes=(1.0,))),
        ("not 80", refuses(dim=80)),
    ):
        assert said in (reason or "")
