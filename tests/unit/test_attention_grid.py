"""Both attention backends against the definition, in float64, over shapes, masks and block tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.interfaces.platform import DeviceCaps
from ferrule.types import CacheGroup
from ferrule_plugins.attention.cpu import PIECE, CpuAttention
from ferrule_plugins.attention.torch_sdpa import TorchSDPA

BACKENDS = [TorchSDPA, CpuAttention]
DIM = 8
CAPS = DeviceCaps("cpu", "test", 1 << 30)

# (query tokens, context tokens) of each row of a step
STEPS = {
    "decode": [(1, 1), (1, 17), (1, 33), (1, 33)],
    "prefill": [(5, 5), (9, 9), (1, 1)],
    "chunks": [(4, 19), (7, 7), (1, 40), (3, 3), (2, 29)],
    "long": [(PIECE + 44, PIECE + 50), (1, 300), (2, 2)],
}


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    options: AttentionOptions
    dtype: torch.dtype = torch.float32


def _case(heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32, **options: object) -> Case:
    return Case(heads, kv_heads, AttentionOptions(scale=0.3, **options), dtype)  # type: ignore[arg-type]


CASES = {
    "grouped": _case(),
    "equal": _case(kv_heads=4),
    "single": _case(kv_heads=1),
    "window": _case(window=6),
    "window1": _case(window=1),
    "cap": _case(soft_cap=2.0),
    "cap-window": _case(soft_cap=2.0, window=9),
    "alibi": _case(alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
    "sinks": _case(sinks=torch.tensor([0.1, -1.0, 2.0, 0.0])),
    "half": _case(dtype=torch.bfloat16),
}


def _naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """One row by the definition: q [queries, heads, dim], k and v [keys, kv_heads, dim], all float64."""
    out = torch.zeros_like(q)
    offset = k.shape[0] - q.shape[0]
    for i, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        kv, at = h * k.shape[1] // q.shape[1], offset + i
        first = max(0, at - options.window + 1) if options.window else 0
        scores = []
        for j in range(first, at + 1):
            s = float(q[i, h] @ k[j, kv]) * options.scale
            s = math.tanh(s / options.soft_cap) * options.soft_cap if options.soft_cap else s
            scores.append(s - (options.alibi_slopes[h] * (at - j) if options.alibi_slopes else 0.0))
        extra = [float(options.sinks[h])] if options.sinks is not None else []
        weights = torch.tensor(scores + extra, dtype=torch.float64).softmax(0)[: len(scores)]
        out[i, h] = weights @ v[first : at + 1, kv]
    return out


def _layout(step: Sequence[tuple[int, int]], block_size: int, window: int) -> AttentionLayout:
    """Block tables in a shuffled order; blocks 0 (null) and 1 belong to nobody."""
    order = np.random.default_rng(0).permutation(sum(-(-n // block_size) for _, n in step)) + 2
    free, width = iter(order.tolist()), max(-(-n // block_size) for _, n in step)
    table = torch.zeros(len(step), width, dtype=torch.int32)
    slots: list[int] = []
    for row, (count, length) in enumerate(step):
        table[row, : -(-length // block_size)] = torch.tensor([next(free) for _ in range(-(-length // block_size))])
        slots += [int(table[row, p // block_size]) * block_size + p % block_size for p in range(length - count, length)]
    counts, lengths = tuple(c for c, _ in step), tuple(n for _, n in step)
    return AttentionLayout(
        query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots),
        block_size=block_size,
        max_query_len=max(counts),
        max_context_len=max(lengths),
        query_lens_host=counts,
        context_lens_host=lengths,
        window=window,
    )


SHORT = [grid for grid in itertools.product(CASES, STEPS, (1, 4, 16)) if grid[1] != "long"]
LONG = [(name, "long", 16) for name in ("grouped", "window", "cap")]  # once for each path: the definition is slow


@pytest.mark.parametrize(("name", "step", "block_size"), SHORT + LONG)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_definition(backend: type[AttentionBackend], name: str, step: str, block_size: int) -> None:
    case, rows = CASES[name], STEPS[step]
    torch.manual_seed(1)
    window, layout = case.options.window, _layout(rows, block_size, case.options.window)
    spec = LayerCache(CacheGroup("full", block_size, window), case.kv_heads, DIM)
    attention = backend()
    cache = torch.full(attention.cache_shape(spec, 200), float("nan"), dtype=case.dtype)
    cache[0] = 0  # the null block
    flat = cache.view(-1, 2, case.kv_heads, DIM)
    total = sum(count for count, _ in rows)
    q = torch.randn(total, case.heads, DIM, dtype=case.dtype)
    new = torch.randn(2, total, case.kv_heads, DIM, dtype=case.dtype)
    expected, start = [], 0
    for row, (count, length) in enumerate(rows):
        past = torch.randn(2, length - count, case.kv_heads, DIM, dtype=case.dtype)
        for p in range(length - count):
            flat[int(layout.block_table[row, p // block_size]) * block_size + p % block_size] = past[:, p]
        if window:  # what lies behind the window of the row's first query is dead: any block may stand there
            dead = max(0, length - count - window + 1) // block_size
            layout.block_table[row, :dead] = 1
        keys, values = torch.cat((past, new[:, start : start + count]), dim=1).double()
        expected.append(_naive(q[start : start + count].double(), keys, values, case.options))
        start += count
    out = attention.run(q, new[0], new[1], cache, attention.plan(layout), case.options)
    tolerance = 2e-2 if case.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=tolerance, atol=tolerance)
    assert not cache[0].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_see_what_its_block_held_before(backend: type[AttentionBackend]) -> None:
    """NaN left in the unwritten part of a block, by whoever had it before, stays there."""
    layout = _layout([(1, 3), (2, 6)], 8, 0)
    attention = backend()
    cache = torch.full(attention.cache_shape(LayerCache(CacheGroup("full", 8), 2, DIM), 8), float("inf"))
    cache[0] = 0
    for row, length in enumerate((3, 6)):
        cache[int(layout.block_table[row, 0]), :length] = 1.0
    q, k = torch.randn(3, 4, DIM), torch.randn(3, 2, DIM)
    assert attention.run(q, k, k, cache, attention.plan(layout), AttentionOptions(scale=0.3)).isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_decode_rows_of_all_lengths(backend: type[AttentionBackend]) -> None:
    rng = np.random.default_rng(3)
    rows = [(1, int(n)) for n in rng.integers(1, 200, size=60)]
    layout = _layout(rows, 16, 0)
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
            out[row : row + 1].double(), _naive(q[row : row + 1].double(), kv[:, 0], kv[:, 1], options),
            rtol=1e-5, atol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"soft_cap": 5.0}])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    lengths = [1, 2, 15, 16, 17, 33, 90, 200, 500, 511, 520, 700]
    rows = [(1, n) for n in lengths] + [(int(rng.integers(2, 1 + min(n, 150))), n) for n in lengths if n > 2]
    window, heads, kv_heads, dim = options.get("window", 0), 4, 2, 32
    layout, scoring = _layout(rows, 16, window), AttentionOptions(scale=0.2, **options)
    attention = CpuAttention()
    torch.manual_seed(2)
    cache = torch.randn(attention.cache_shape(LayerCache(CacheGroup("full", 16), kv_heads, dim), 500)).to(dtype)
    cache[0] = 0
    total = sum(count for count, _ in rows)
    q, k, v = (torch.randn(total, h, dim).to(dtype) for h in (heads, kv_heads, kv_heads))
    together = attention.run(q, k, v, cache, attention.plan(layout), scoring)
    start = 0
    for row, (count, length) in enumerate(rows):
        part = slice(start, start + count)
        alone = replace(
            layout,
            block_table=layout.block_table[row : row + 1],
            slot_mapping=layout.slot_mapping[part],
            query_lens_host=(count,),
            context_lens_host=(length,),
        )
        out = attention.run(q[part], k[part], v[part], cache, attention.plan(alone), scoring)
        if dtype == torch.bfloat16 and not options.get("soft_cap"):
            assert torch.equal(out, together[part]), (count, length)
        else:
            torch.testing.assert_close(out, together[part], rtol=1e-2, atol=1e-5)
        start += count


def test_pieces_get_smaller_as_the_context_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores that are held at once have a bound; what comes out does not depend on it."""
    layout, options = _layout([(30, 45), (1, 20), (7, 7)], 4, 0), AttentionOptions(scale=0.3, soft_cap=3.0)
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
    assert "cuda" in str(CpuAttention.refuses(spec, options, DeviceCaps("cuda", "x", 1), torch.float32))
    assert TorchSDPA.refuses(spec, options, CAPS, torch.float32) is None
