"""What the built-in attention backends promise beyond their kit: many rows, equal bits, bounded scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ferrule.interfaces.attention import AttentionBackend
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.types import CacheGroup
from ferrule_plugins.attention.cpu import CpuAttention
from ferrule_plugins.attention.torch_sdpa import TorchSDPA
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.kits.attention import alone, layout_of
from ferrule_testkit.kits.attention import attention as definition

BACKENDS = [TorchSDPA, CpuAttention]
DIM = 8
CAPS = fake_caps()


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_decode_rows_of_all_lengths(backend: type[AttentionBackend]) -> None:
    rng = np.random.default_rng(3)
    rows = [(1, int(n)) for n in rng.integers(1, 200, size=60)]
    layout = layout_of(rows, 16, 0)
    attention = backend()
    cache = torch.randn(attention.cache_shape(LayerCache(CacheGroup("full", 16), 1, DIM), 1000))
    cache[0] = 0
    q, k, v = torch.randn(60, 2, DIM), torch.randn(60, 1, DIM), torch.randn(60, 1, DIM)
    options = AttentionOptions(scale=0.3)
    out = attention.run(q, k, v, cache, attention.plan(layout), options)
    flat = cache.view(-1, 2, 1, DIM)
    for row in rng.integers(0, 60, size=8).tolist():
        slots = [int(layout.block_table[row, p // 16]) * 16 + p % 16 for p in range(rows[row][1])]
        kv = flat[slots].double()
        torch.testing.assert_close(
            out[row : row + 1].double(), definition(q[row : row + 1].double(), kv[:, 0], kv[:, 1], options),
            rtol=1e-5, atol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"soft_cap": 5.0}])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    lengths = [1, 2, 15, 16, 17, 33, 90, 200, 500, 511, 520, 700]
    rows = [(1, n) for n in lengths] + [(int(rng.integers(2, 1 + min(n, 150))), n) for n in lengths if n > 2]
    window, heads, kv_heads, dim = options.get("window", 0), 4, 2, 32
    layout, scoring = layout_of(rows, 16, window), AttentionOptions(scale=0.2, **options)
    attention = CpuAttention()
    torch.manual_seed(2)
    cache = torch.randn(attention.cache_shape(LayerCache(CacheGroup("full", 16), kv_heads, dim), 500)).to(dtype)
    cache[0] = 0
    total = sum(count for count, _ in rows)
    q, k, v = (torch.randn(total, h, dim).to(dtype) for h in (heads, kv_heads, kv_heads))
    together = attention.run(q, k, v, cache, attention.plan(layout), scoring)
    for row, (count, length) in enumerate(rows):
        part, step = alone(layout, row)
        out = attention.run(q[part], k[part], v[part], cache, attention.plan(step), scoring)
        if dtype == torch.bfloat16 and not options.get("soft_cap"):
            assert torch.equal(out, together[part]), (count, length)
        else:
            torch.testing.assert_close(out, together[part], rtol=1e-2, atol=1e-5)


def test_pieces_get_smaller_as_the_context_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound the scores that are in memory at once; the result does not depend on the bound."""
    layout, options = layout_of([(30, 45), (1, 20), (7, 7)], 4, 0), AttentionOptions(scale=0.3, soft_cap=3.0)
    attention = CpuAttention()
    cache = torch.randn(attention.cache_shape(LayerCache(CacheGroup("full", 4), 2, DIM), 40))
    cache[0] = 0
    q, k, v = torch.randn(38, 4, DIM), torch.randn(38, 2, DIM), torch.randn(38, 2, DIM)
    whole = attention.run(q, k, v, cache, attention.plan(layout), options)
    monkeypatch.setattr("ferrule_plugins.attention.cpu.SCORES", 200)
    plan = attention.plan(layout)
    assert max(b.rows * b.queries * b.span for b in plan.buckets) <= 200 * 64
    torch.testing.assert_close(attention.run(q, k, v, cache, plan, options), whole)


def test_the_cpu_backend_refuses_other_devices() -> None:
    spec, options = LayerCache(CacheGroup("full", 16), 1, DIM), AttentionOptions(scale=1.0)
    assert CpuAttention.refuses(spec, options, CAPS, torch.float32) is None
    assert "cuda" in str(CpuAttention.refuses(spec, options, fake_caps("cuda"), torch.float32))
    assert TorchSDPA.refuses(spec, options, CAPS, torch.float32) is None
