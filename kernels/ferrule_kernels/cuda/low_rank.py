"""Sums of products and products of low rank, each row with the matrices of its group, in two launches.

Ranks and groups are read on the device, so a recorded step stays valid when either changes. A program of few rows has
one of them, and so have steps in which each row is another request's. One of many has a block of them, and goes through
the groups in it, one after the other: tokens of a prompt stand together, so that there is rarely more than one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate

import torch
import triton
import triton.language as tl

from ferrule_kernels.cuda.cases import Case, half
from ferrule_kernels.low_rank import LowRank, check_rows

_ALONE = 256  # rows up to which a program has one
_BLOCK, _RANKS, _DEPTH, _COLUMNS = 16, 16, 128, 128


@triton.jit
def _down_row(
    x,
    groups,
    down,
    ranks,
    rank_scales,
    inner,
    max_rank,
    INPUTS: tl.constexpr,
    TABLE: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row, projection, projections = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    first = tl.program_id(2) * RANKS
    group = tl.load(groups + row)
    rank = tl.load(ranks + group * projections + projection)
    if rank > first:
        k = first + tl.arange(0, RANKS)
        exists = k < rank
        if TABLE:
            sums = tl.load(down + (group * INPUTS + tl.load(x + row)) * max_rank + k, exists, 0.0).to(tl.float32)
        else:
            depth = tl.arange(0, DEPTH)
            at = down + ((group * projections + projection) * max_rank + k)[:, None] * INPUTS + depth[None, :]
            total = tl.zeros([RANKS, DEPTH], tl.float32)
            for start in range(0, INPUTS, DEPTH):
                left = depth < INPUTS - start
                numbers = tl.load(x + row * INPUTS + start + depth, left, 0.0).to(tl.float32)
                weights = tl.load(at + start, exists[:, None] & left[None, :], 0.0).to(tl.float32)
                total += weights * numbers[None, :]
            sums = tl.sum(total, 1)
        sums *= tl.load(rank_scales + (group * projections + projection) * max_rank + k, exists, 0.0)
        tl.store(inner + (row * projections + projection) * max_rank + k, sums, exists)


@triton.jit
def _down_block(
    x, groups, down, ranks, rank_scales, inner, count, max_rank,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    projection, projections = tl.program_id(1), tl.num_programs(1)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k, depth = tl.program_id(2) * RANKS + tl.arange(0, RANKS), tl.arange(0, DEPTH)
    group_of = tl.load(groups + rows, rows < count, -1)
    group = tl.max(group_of, 0)
    while group >= 0:
        rank = tl.load(ranks + group * projections + projection)
        if rank > tl.program_id(2) * RANKS:
            mine, exists = group_of == group, k < rank
            at = down + ((group * projections + projection) * max_rank + k)[None, :] * INPUTS + depth[:, None]
            sums = tl.zeros([BLOCK, RANKS], tl.float32)
            for start in range(0, INPUTS, DEPTH):
                left = depth < INPUTS - start
                numbers = tl.load(
                    x + rows[:, None] * INPUTS + start + depth[None, :], mine[:, None] & left[None, :], 0.0
                )
                weights = tl.load(at + start, left[:, None] & exists[None, :], 0.0)
                sums = tl.dot(numbers, weights.to(numbers.dtype), sums, input_precision="ieee")
            sums *= tl.load(rank_scales + (group * projections + projection) * max_rank + k, exists, 0.0)[None, :]
            to = inner + (rows[:, None] * projections + projection) * max_rank + k[None, :]
            tl.store(to, sums, mine[:, None] & exists[None, :])
        group = tl.max(tl.where(group_of < group, group_of, -1), 0)


@triton.jit
def _up(
    y, groups, up, ranks, inner, changed, scales, offsets, ends, count, max_rank, outputs,
    TILES: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    projection, projections = tl.program_id(1) // TILES, tl.num_programs(1) // TILES
    begin = tl.load(ends + projection)
    column = begin + tl.program_id(1) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < tl.load(ends + projection + 1)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = tl.arange(0, RANKS)
    group_of = tl.load(groups + rows, rows < count, -1)
    group = tl.max(group_of, 0)
    while group >= 0:
        rank = tl.load(ranks + group * projections + projection)
        change = tl.load(changed + group) != 0
        if (rank > 0) | change:
            mine = group_of == group
            sums = tl.zeros([BLOCK, COLUMNS], tl.float32)
            for start in range(0, rank, RANKS):
                k = start + within
                from_inner = inner + (rows[:, None] * projections + projection) * max_rank + k[None, :]
                numbers = tl.load(from_inner, mine[:, None] & (k < rank)[None, :], 0.0)
                at = up + (group * max_rank + k)[:, None] * outputs + column[None, :]
                weights = tl.load(at, (k < rank)[:, None] & inside[None, :], 0.0).to(tl.float32)
                if BLOCK == 1:
                    sums += tl.sum(tl.trans(numbers) * weights, 0)[None, :]
                else:
                    sums = tl.dot(numbers, weights, sums, input_precision="ieee")
            to, there = y + rows[:, None] * outputs + column[None, :], mine[:, None] & inside[None, :]
            before = tl.load(to, there, 0.0).to(tl.float32)
            if change:
                scale = tl.load(scales + group * outputs + column, inside, 0.0)
                before = before * scale[None, :] + tl.load(offsets + group * outputs + column, inside, 0.0)[None, :]
            tl.store(to, (before + sums).to(y.dtype.element_ty), there)
        group = tl.max(tl.where(group_of < group, group_of, -1), 0)


class LowRankSum:
    """The kernels for some weights, as `ferrule_kernels.low_rank.add`."""

    def __init__(self, weights: LowRank) -> None:
        self._weights = weights
        self._ends = torch.tensor([0, *accumulate(weights.outputs)], device=weights.up.device)
        self._tiles = triton.cdiv(max(weights.outputs), _COLUMNS)

    def __call__(self, x: torch.Tensor, y: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        weights, rows = self._weights, len(y)
        check_rows(weights, x, y, groups)
        if not rows:
            return y
        given, x, y, groups = y, x.contiguous(), y.contiguous(), groups.contiguous()
        projections, max_rank = len(weights.outputs), weights.max_rank
        inner = torch.empty((rows, projections, max_rank), dtype=torch.float32, device=x.device)
        steps = triton.cdiv(max_rank, _RANKS)
        block = 1 if rows <= _ALONE else _BLOCK
        matrices = x, groups, weights.down, weights.ranks, weights.rank_scales, inner
        if block == 1 or weights.table:
            grid = rows, projections, steps
            _down_row[grid](*matrices, max_rank, weights.inputs, weights.table, _RANKS, _DEPTH, num_warps=4)
        else:
            grid = triton.cdiv(rows, block), projections, steps
            _down_block[grid](*matrices, rows, max_rank, weights.inputs, block, _RANKS, _DEPTH, num_warps=4)
        _up[triton.cdiv(rows, block), projections * self._tiles](
            y,
            groups,
            weights.up,
            weights.ranks,
            inner,
            weights.changed,
            weights.scales,
            weights.offsets,
            self._ends,
            rows,
            max_rank,
            sum(weights.outputs),
            self._tiles,
            block,
            _RANKS,
            _COLUMNS,
            num_warps=4,
        )
        return y if y is given else given.copy_(y)


def cases(device: torch.device) -> Iterator[Case]:
    """Yield cases of the merged projections of one layer of a 0.6B model, with 16 adapters of rank 16."""
    real = device.type == "cuda"
    inputs, outputs = (1024, (2048, 1024, 1024)) if real else (48, (32, 16))
    weights = LowRank(17, 16, inputs, outputs, half(device), device)
    weights.down.normal_()
    weights.up.normal_()
    weights.ranks[1:] = 16
    kernel = LowRankSum(weights)
    each = 2 * 16 * (len(outputs) * inputs + sum(outputs))
    for rows in (16, 64, 4096) if real else (4,):
        x = torch.randn(rows, inputs, device=device).to(half(device))
        y = torch.randn(rows, sum(outputs), device=device).to(half(device))
        groups = 1 + torch.arange(rows, device=device) * 16 // rows
        moved = each * min(rows, 16) + x.nbytes + 2 * y.nbytes
        yield Case(f"low rank 16 of {rows}", partial(kernel, x, y, groups), moved, each * rows)
