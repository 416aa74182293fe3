"""Paged attention on GPUs beside its definition: shapes, options, splits, padding rows, equal bits in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from ferrule.interfaces.model import AttentionOptions
from ferrule_kernels.cuda import attention as kernel
from ferrule_testkit.kits.attention import attention as definition
from ferrule_testkit.kits.attention import layout_of
from tests.shared import grid

Rows = Sequence[tuple[int, int]]  # (queries, context) of each

MIXED: Rows = [(1, 5), (20, 33), (3, 40), (40, 40), (1, 1)]
LONG: Rows = [(1, 1200), (20, 33), (3, 700), (5, 512)]
ASIDE = () if torch.cuda.is_available() else pytest.mark.slow  # the interpreter takes seconds for each


@dataclass
class World:
    """Rows whose keys and values lie in a cache that is otherwise full of NaN, but for block 0."""

    rows: Rows
    options: AttentionOptions
    device: torch.device
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.layout = layout_of(self.rows, self.block_size, self.options.window)
        kind = self.cache_dtype or self.dtype
        shape = kernel.cache_shape(int(self.layout.block_table.max()) + 1, self.block_size, self.kv_heads, self.dim)
        cache = torch.full(shape, float("nan"), dtype=self.dtype)
        cache[0] = 0
        queries, self.past = [], []
        for row, (count, length) in enumerate(self.rows):
            q, k, v = (torch.randn(length, n, self.dim) for n in (self.heads, self.kv_heads, self.kv_heads))
            k, v = (side.to(kind).to(self.dtype) for side in (k, v))  # what a cache of 8 bits can hold
            queries.append(q[length - count :].to(self.dtype))
            self.past.append((k, v))
            for position in range(length):
                block = int(self.layout.block_table[row, position // self.block_size])
                if block > 1:  # others are dead
                    cache[block, 0, :, position % self.block_size] = k[position]
                    cache[block, 1, :, position % self.block_size] = v[position]
        self.q, self.cache = torch.cat(queries).to(self.device), cache.to(kind).to(self.device)

    def batch(self, **changes: Any) -> kernel.Batch:
        layout = self.layout
        short, has_long = kernel.Batch.kinds(layout.query_lens_host, layout.max_query_len)
        batch = kernel.Batch(
            query_start=layout.query_start.to(self.device),
            context_lens=layout.context_lens.to(self.device),
            block_table=layout.block_table.to(self.device),
            block_size=self.block_size,
            max_context_len=layout.max_context_len,
            short_queries=short,
            has_long=has_long,
        )
        return replace(batch, **changes)

    def run(self, scales: tuple[float, float] = (1.0, 1.0), **changes: Any) -> torch.Tensor:
        batch = self.batch(**changes)
        return kernel.attend(self.q, self.cache, batch, self.options, self.options.window, scales).cpu()

    def part(self, row: int) -> slice:
        start = sum(count for count, _ in self.rows[:row])
        return slice(start, start + self.rows[row][0])

    def expected(self, scales: tuple[float, float] = (1.0, 1.0)) -> torch.Tensor:
        rows = []
        for row, (k, v) in enumerate(self.past):
            q = self.q[self.part(row)].double().cpu()
            rows.append(definition(q, k.double() * scales[0], v.double() * scales[1], self.options))
        return torch.cat(rows)

    def check(self, scales: tuple[float, float] = (1.0, 1.0)) -> None:
        exact = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[self.dtype]
        torch.testing.assert_close(self.run(scales).double(), self.expected(scales), rtol=exact, atol=exact)


def options(dim: int = 32, **more: Any) -> AttentionOptions:
    return AttentionOptions(scale=dim**-0.5, **more)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(4, 2, 64, 16), (2, 2, 80, 4), (6, 2, 96, 16), (5, 1, 32, 1), (16, 1, 48, 128), (2, 1, 256, 32), (20, 1, 8, 2)],
)
def test_shapes(device: torch.device, heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    World(MIXED, options(dim), device, heads, kv_heads, dim, block_size).check()


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 6},
    "window of one": {"window": 1},
    "window of splits": {"window": 600},
    "soft cap": {"soft_cap": 2.0},
    "slopes": {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
    "sinks": {"sinks": (0.1, -1.0, 2.0, 0.0)},
    "all": {"sinks": (0.1, -1.0, 2.0, 0.0), "window": 40, "soft_cap": 3.0, "alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
}


@grid({"name": list(OPTIONS), "rows": [MIXED, LONG]})
def test_options(device: torch.device, rows: Rows, name: str) -> None:
    more = OPTIONS[name]
    if "sinks" in more:
        more = {**more, "sinks": torch.tensor(more["sinks"], device=device)}
    World(rows, options(**more), device).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types(device: torch.device, on_gpu: bool, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not on_gpu:
        pytest.skip("the interpreter's products of bfloat16 are wrong")
    World(LONG, options(), device, dtype=dtype).check()


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, pytest.param(torch.float8_e5m2, marks=ASIDE)])
def test_a_cache_of_8_bits_and_its_scales(device: torch.device, kind: torch.dtype) -> None:
    world = World([(1, 600), (4, 30), (20, 50)], options(), device, cache_dtype=kind)
    world.check()
    world.check(scales=(0.5, 3.0))


@pytest.mark.parametrize(
    "more", [{}, *(pytest.param(one, marks=ASIDE) for one in ({"window": 530}, {"soft_cap": 2.0}))]
)
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device, more: dict[str, Any]) -> None:
    """Compute a row alone, beside others, with more splits than it needs, and with programs that share splits."""
    rows = [(1, 1100), (30, 60), (17, 530)]
    rows += [(1, 512), (16, 530)] if device.type == "cuda" else []
    world = World(rows, options(**more), device, heads=2, kv_heads=1)
    together = world.run()
    for row, (count, length) in enumerate(rows):
        part, whole = world.part(row), world.batch()
        short, has_long = kernel.Batch.kinds((count,), count)
        alone = kernel.Batch(
            query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
            context_lens=whole.context_lens[row : row + 1],
            block_table=whole.block_table[row : row + 1],
            block_size=world.block_size,
            max_context_len=length,
            short_queries=short,
            has_long=has_long,
        )
        for batch in (alone, replace(alone, max_context_len=5000)):
            out = kernel.attend(world.q[part], world.cache, batch, world.options, world.options.window)
            assert torch.equal(out.cpu(), together[part]), (count, length)


def test_programs_that_share_splits_change_no_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([(1, 1700), (1, 3), (2, 1030)], options(), device, heads=2, kv_heads=1)
    apart = world.run()
    monkeypatch.setattr(kernel, "_PROGRAMS", 1)
    assert torch.equal(world.run(), apart)


def test_a_context_with_most_splits_has_longer_ones(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MOST_SPLITS", 2)
    World([(1, 1500), (2, 600)], options(), device, heads=2).check()


def test_rows_of_a_graph_that_are_padding(device: torch.device) -> None:
    """Pad a recorded step with rows that have no query, or no context; only the longest context is known."""
    world = World([(1, 40), (1, 600)], options(), device)
    wanted, whole = world.run(), world.batch()
    tables = torch.cat((whole.block_table, torch.zeros_like(whole.block_table)))
    contexts = torch.tensor([40, 600, 0, 0], dtype=torch.int32, device=device)
    q = torch.cat((world.q, torch.full_like(world.q, float("nan"))))
    for starts in ([0, 1, 2, 2, 2], [0, 1, 2, 3, 4]):
        batch = replace(
            whole,
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            context_lens=contexts,
            block_table=tables,
            max_context_len=2000,
        )
        out = kernel.attend(q, world.cache, batch, world.options).cpu()
        assert torch.equal(out[:2], wanted)
    assert not out[2:].any()


def test_a_query_is_read_by_strides(device: torch.device) -> None:
    world = World(MIXED, options(), device)
    wanted = world.run()
    tokens = len(world.q)
    rows = torch.full((tokens, 9, 32), float("nan"), device=device)
    rows[:, 2:6] = world.q
    world.q = rows[:, 2:6]
    assert torch.equal(world.run(), wanted)


def test_a_page_of_a_larger_storage(device: torch.device) -> None:
    """Read pages that lie apart, as a layer's whose heads are smaller than those of other layers."""
    world = World(MIXED, options(), device)
    wanted = world.run()
    storage = torch.full((world.cache.shape[0], world.cache[0].numel() + 48), float("nan"), device=device)
    storage[:, :-48] = world.cache.flatten(1)
    world.cache = storage[:, :-48].view(world.cache.shape)
    assert torch.equal(world.run(), wanted)


def test_an_infinite_score_stays_in_its_row(device: torch.device) -> None:
    world = World([(40, 40), (1, 40)], options(), device)
    block = int(world.layout.block_table[0, 1])  # of position 16
    world.cache[block, 0, :, 0] = float("inf")
    out = world.run()
    assert bool(out[:16].isfinite().all())
    assert not bool(out[16:40].isfinite().all())
    assert bool(out[40:].isfinite().all())


@pytest.mark.parametrize("group", [1, 4, 7, 8, 71])
@pytest.mark.parametrize("dim", [32, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cut_fits_the_device(group: int, dim: int, dtype: torch.dtype) -> None:
    for short, shared in ((True, 227 << 10), (False, 227 << 10), (True, 99 << 10), (False, 99 << 10)):
        cut = kernel.tiles(group, dim, dtype, dtype, short, shared)
        width = kernel.power_of_2(dim) * dtype.itemsize
        assert 0 < cut.queries * group <= cut.rows
        assert kernel.SPLIT % cut.keys == 0
        ahead = (cut.stages - 1) // 2
        assert cut.rows * width + 2 * ahead * cut.keys * width <= shared or ahead == 0
