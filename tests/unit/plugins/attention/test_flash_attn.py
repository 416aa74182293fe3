"""FlashAttention as a backend, against functions that compute what its documentation says."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.interfaces.platform import DeviceCaps
from ferrule.types import CacheGroup
from ferrule_plugins.attention import flash_attn as backend
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.kits import AttentionKit

HOPPER = fake_caps("cuda", {"sm90"})
AMPERE = fake_caps("cuda", {"sm80"})


def row_attention(q: Any, k: Any, v: Any, scale: float, window: tuple[int, int], cap: float, slopes: Any) -> Any:
    """Compute one row: q [queries, heads, dim], k and v [keys, kv_heads, dim]; the mask ends at the bottom right
    corner.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    i = torch.arange(q.shape[0]).unsqueeze(1) + k.shape[0] - q.shape[0]
    j = torch.arange(k.shape[0])
    if slopes is not None:
        scores = scores - slopes.view(-1, 1, 1) * (i - j).abs()
    seen = j <= i
    if window[0] >= 0:
        seen = seen & (j >= i - window[0])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).to(q.dtype)


def from_pages(cache: Any, table: Any, length: int) -> Any:
    """Return the first `length` tokens of pages [blocks, page, kv_heads, dim] that a row's table names, in order."""
    pages = -(-length // cache.shape[1])
    return cache[table[:pages].long()].flatten(0, 1)[:length]


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """Stand in for the function of version 2.8."""
    assert causal
    assert k.shape[1] % 256 == 0
    assert k.stride(-1) == 1
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert {x.dtype for x in (cu_seqlens_q, cu_seqlens_k, block_table)} == {torch.int32}
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(queries), max(keys)) == (max_seqlen_q, max_seqlen_k)
    rows = [
        row_attention(
            part, *(from_pages(x, table, n) for x in (k, v)), softmax_scale, window_size, softcap, alibi_slopes
        )
        for part, table, n in zip(q.split(queries), block_table, keys, strict=True)
    ]
    return torch.cat(rows)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """Stand in for the function of version 3, as the module in `hopper/` has it."""
    assert causal
    assert k is None
    assert {x.dtype for x in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
    queries = cu_seqlens_q.diff().tolist()
    assert max(queries) == max_seqlen_q
    rows = [
        row_attention(part, from_pages(k_cache, table, n), from_pages(v_cache, table, n), softmax_scale, window_size,
                      softcap, None)
        for part, table, n in zip(q.split(queries), page_table, cache_seqlens.tolist(), strict=True)
    ]  # fmt: skip
    return torch.cat(rows)


def install(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(autouse=True)
def _cpu_is_an_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_hopper", lambda device: False)


class OnCpu(AttentionKit):
    plugin = backend.FlashAttention
    platform = "cuda"
    device = "cpu"
    dtypes = ("float16", "bfloat16")
    head_dims = (8, 64)


class TestSecond(OnCpu):
    block_sizes = (256,)

    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, "flash_attn", flash_attn_varlen_func)


class TestThird(OnCpu):
    block_sizes = (1, 16)

    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache)
        monkeypatch.setattr(backend, "_hopper", lambda device: True)
        monkeypatch.setattr(backend, "_third", lambda options, caps: not options.alibi_slopes)


def refuses(caps: DeviceCaps = AMPERE, dtype: torch.dtype = torch.bfloat16, **more: Any) -> str | None:
    spec = LayerCache(CacheGroup("full", more.pop("block_size", 256)), 2, more.pop("dim", 128))
    return backend.FlashAttention.refuses(spec, AttentionOptions(scale=1.0, **more), caps, dtype)


def test_a_package_that_is_missing_is_named() -> None:
    assert refuses() == "the package flash_attn is not installed (pip install flash-attn --no-build-isolation)"
    assert refuses(HOPPER) == refuses()


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn", flash_attn_varlen_func)
    assert refuses() is None
    for said, reason in (
        ("not on cpu", refuses(fake_caps())),
        ("not in float32", refuses(dtype=torch.float32)),
        ("no sinks", refuses(sinks=torch.zeros(4))),
        ("not 12", refuses(dim=12)),
        ("not 264", refuses(dim=264)),
        ("multiple of 256 for version 2, not 16", refuses(block_size=16)),
    ):
        assert said in (reason or "")


def test_version_3_has_pages_of_any_size_but_no_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache)
    assert refuses(HOPPER, block_size=16) is None
    assert "flash_attn is not installed" in (refuses(AMPERE, block_size=16) or "")
    assert "flash_attn is not installed" in (refuses(HOPPER, block_size=16, alibi_slopes=(1.0,)) or "")
