"""Products with weights of 4 bits: groups of inputs share a scale, and a zero point where they are not symmetric.

Weights are packed once, in the order in which a program reads them: [ceil(k / 128), n, 32] words of 16 bits. A program
reads 128 inputs of its channels at a time, which are one run of memory; word i holds the inputs i, 32 + i, 64 + i and
96 + i of them, lowest bits first. So each quarter of a word is 32 neighbouring inputs, which lie within one group: it
is masked out and set into the mantissa of 2^23, which replaces a conversion. Subtracting the zero point, multiplying
by the scale and rounding once gives a weight in the type of the activations, in registers. With many rows the weights
are written to memory once, and torch computes the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from ferrule_kernels.cuda.cases import Case, half
from ferrule_kernels.cuda.int8 import shapes
from ferrule_kernels.cuda.products import SWATHE, VARYING, Tile, add, cut, finished, fitting, place
from ferrule_kernels.cuda.widening import fields, packed

SPAN = 128  # inputs that are packed together
QUARTER = 32
MANY = 512  # rows from which weights are made in memory
_BASE = tl.constexpr(8388608.0)  # 2^23: in its mantissa an integer is that integer
_BASE_BITS = tl.constexpr(0x4B000000)


@dataclass(frozen=True)
class Packed:
    """A weight [n, k] of 4 bits. `group` is a multiple of 32 that counts inputs."""

    words: torch.Tensor  # [ceil(k / 128), n, 32] int16
    scales: torch.Tensor  # [groups, n], of the type of the activations
    zeros: torch.Tensor | None  # [groups, n] uint8
    group: int
    inputs: int


def pack(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int) -> Packed:
    """Pack numbers uint8 [n, k], from 0 to 15, that stand for (number - zero) * scale.

    `scales` [n, groups] are of the type of the activations to come; `zeros` [n, groups] are integers from 0 to 16, 8
    where they are None. `group` is a multiple of 32, or at least k. Raises ValueError for another.
    """
    n, k = numbers.shape
    if group % QUARTER:
        if group < k:
            raise ValueError(f"groups of {group} inputs: the kernel takes multiples of {QUARTER}")
        group = -(-k // QUARTER) * QUARTER
    parts = F.pad(numbers, (0, -k % SPAN)).view(n, -1, 4, QUARTER).to(torch.int32)
    words = parts[:, :, 0] | parts[:, :, 1] << 4 | parts[:, :, 2] << 8 | parts[:, :, 3] << 12
    words = torch.where(words > 0x7FFF, words - 0x10000, words).to(torch.int16)
    points = None if zeros is None else zeros.to(torch.uint8).t().contiguous()
    return Packed(words.transpose(0, 1).contiguous(), scales.t().contiguous(), points, group, k)


@triton.jit
def _weights(words, scales, zeros, column, at, index: tl.constexpr, groups, n, GROUP: tl.constexpr, like: tl.constexpr):
    """Compute weights [columns, 32] of inputs from `at` on. Inputs past the last use the last group."""
    group = tl.minimum(at // GROUP, groups - 1) * n + column
    scale = tl.load(scales + group).to(tl.float32)
    number = (((words >> (4 * index)) & 0xF) | _BASE_BITS).to(tl.float32, bitcast=True)
    if zeros is None:
        number -= _BASE + 8.0
    else:
        number -= (tl.load(zeros + group).to(tl.float32) + _BASE)[:, None]
    return (number * scale[:, None]).to(like)


@triton.jit
def _level(scales, zeros, column, at, groups, n, GROUP: tl.constexpr, like: tl.constexpr):
    """Load the scale and the offset of inputs from `at` on, as `fields` expects them."""
    group = tl.minimum(at // GROUP, groups - 1) * n + column
    base: tl.constexpr = 128.0 if like == tl.bfloat16 else 1024.0
    if zeros is None:
        offset = tl.zeros_like(column).to(tl.float32) - (base + 8.0)
    else:
        offset = -(tl.load(zeros + group).to(tl.float32) + base)
    return tl.load(scales + group), offset.to(like)


@triton.jit
def _levels(scales, zeros, column, step, groups, n, GROUP: tl.constexpr, like: tl.constexpr):
    """Load the scales and the offsets of the four quarters of a span."""
    at = step * 128
    s0, z0 = _level(scales, zeros, column, at, groups, n, GROUP, like)
    if GROUP % 128 == 0:
        s1, z1, s2, z2, s3, z3 = s0, z0, s0, z0, s0, z0
    else:
        s1, z1 = _level(scales, zeros, column, at + 32, groups, n, GROUP, like)
        s2, z2 = _level(scales, zeros, column, at + 64, groups, n, GROUP, like)
        s3, z3 = _level(scales, zeros, column, at + 96, groups, n, GROUP, like)
    return s0, s1, s2, s3, z0, z1, z2, z3


@triton.jit
def _inputs(x_at, at, inner, k, EVEN: tl.constexpr):
    """Load inputs [32, rows] from `at` on, zero past the last."""
    if EVEN:
        b = tl.load(x_at + at)
    else:
        b = tl.load(x_at + at, mask=inner[:, None] < k - at, other=0.0)
    return b


@triton.jit(do_not_specialize=VARYING)
def _multiply(
    x,  # [m, k]
    words,
    scales,
    zeros,
    bias,
    out,  # [m, n], or [splits, m, n]
    m,
    n,
    k,
    groups,
    steps,  # of a split
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SWATHE: tl.constexpr,
):
    # The weights are the left factor: on Hopper that one may come from registers, where it was made.
    down, across = place(tl.program_id(0), m, n, ROWS, COLUMNS, SWATHE)
    rows, columns = down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)
    row, column = tl.minimum(rows, m - 1), tl.minimum(columns, n - 1)
    inner = tl.arange(0, 32)
    x_at = x + row.to(tl.int64)[None, :] * k + inner[:, None]
    w_at = words + column[:, None] * 32 + inner[None, :]
    like: tl.constexpr = x.dtype.element_ty
    first = tl.program_id(1) * steps
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    end = tl.minimum(first + steps, tl.cdiv(k, 128))
    if PACKED:  # a span's scales are asked for while the one before is computed: they are too narrow to be pipelined
        s0, s1, s2, s3, z0, z1, z2, z3 = _levels(scales, zeros, column, first, groups, n, GROUP, like)
        for step in range(first, end):
            four = tl.load(w_at + tl.cast(step, tl.int64) * n * 32)
            a0, a1, a2, a3 = fields(
                four, s0[:, None], s1[:, None], s2[:, None], s3[:, None],
                z0[:, None], z1[:, None], z2[:, None], z3[:, None], like,
            )  # fmt: skip
            s0, s1, s2, s3, z0, z1, z2, z3 = _levels(scales, zeros, column, step + 1, groups, n, GROUP, like)
            total = tl.dot(a0, _inputs(x_at, step * 128, inner, k, EVEN), total)
            total = tl.dot(a1, _inputs(x_at, step * 128 + 32, inner, k, EVEN), total)
            total = tl.dot(a2, _inputs(x_at, step * 128 + 64, inner, k, EVEN), total)
            total = tl.dot(a3, _inputs(x_at, step * 128 + 96, inner, k, EVEN), total)
    else:
        for step in range(first, end):
            four = tl.load(w_at + tl.cast(step, tl.int64) * n * 32).to(tl.int32)
            for index in tl.static_range(4):
                at = step * 128 + index * 32
                a = _weights(four, scales, zeros, column, at, index, groups, n, GROUP, like)
                total = tl.dot(a, _inputs(x_at, at, inner, k, EVEN), total, input_precision="ieee")
    total = tl.trans(total)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    place_at = rows.to(tl.int64)[:, None] * n + columns[None, :]
    if SPLIT:
        tl.store(out + tl.program_id(1).to(tl.int64) * m * n + place_at, total, mask=inside)
    else:
        y = finished(total, None, None, bias, rows, columns, m, n)
        tl.store(out + place_at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _unpack(words, scales, zeros, out, n, k, groups, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.minimum(columns, n - 1)
    inner = tl.arange(0, 32)
    step = tl.program_id(1)
    like: tl.constexpr = out.dtype.element_ty
    four = tl.load(words + tl.cast(step, tl.int64) * n * 32 + column[:, None] * 32 + inner[None, :]).to(tl.int32)
    for index in tl.static_range(4):
        at = step * 128 + index * 32
        w = _weights(four, scales, zeros, column, at, index, groups, n, GROUP, like)
        inside = (columns < n)[:, None] & (at + inner < k)[None, :]
        tl.store(out + columns.to(tl.int64)[:, None] * k + at + inner[None, :], w, mask=inside)


def unpack(weight: Packed) -> torch.Tensor:
    """Return the weight [n, k] that products use, of the type of its scales."""
    spans, n, _ = weight.words.shape
    out = torch.empty((n, weight.inputs), dtype=weight.scales.dtype, device=weight.words.device)
    grid = (triton.cdiv(n, 32), spans)
    groups = weight.scales.shape[0]
    given = (weight.words, weight.scales, weight.zeros, out, n, weight.inputs, groups)
    _unpack[grid](*given, GROUP=weight.group, COLUMNS=32, num_warps=4)
    return out


def tile_of(rows: int, x: torch.Tensor) -> Tile:
    """Choose the tile for a number of rows. A step is 128 inputs: 64 bytes of each channel, and as many activations."""
    if rows <= 16:
        tile = Tile(16, 128, SPAN, warps=4, stages=3)
    elif rows <= 64:
        tile = Tile(64, 64, SPAN, warps=4, stages=4)
    else:
        tile = Tile(128, 128, SPAN, warps=8, stages=3)
    return fitting(tile, tile.rows * SPAN * x.element_size() + tile.columns * SPAN // 2, x.device)


def multiply(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    num_splits: int = 0,
) -> torch.Tensor:
    """Multiply x [m, k], of the type of the weight's scales: [m, n] of `dtype`, by default x's."""
    (m, k), n, dtype = x.shape, weight.words.shape[1], dtype or x.dtype
    if m > MANY:
        return F.linear(x, unpack(weight), None if bias is None else bias.to(x.dtype)).to(dtype)
    x, out = x.contiguous(), torch.empty((m, n), dtype=dtype, device=x.device)
    if not m:
        return out
    tile = tile_of(m, x)
    made = cut(tile, m, n, k, x.device, num_splits)
    to = made.sums(out)
    _multiply[(made.tiles, made.parts)](
        x,
        weight.words,
        weight.scales,
        weight.zeros,
        bias,
        to,
        m,
        n,
        k,
        weight.scales.shape[0],
        made.per,
        GROUP=weight.group,
        SPLIT=made.parts > 1,
        EVEN=k % SPAN == 0,
        PACKED=packed(x.device, x.dtype),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        SWATHE=SWATHE,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if made.parts > 1:
        add(to, out, None, None, bias)
    return out


def cases(device: torch.device) -> Iterator[Case]:
    for m, n, k in shapes(device):
        x = torch.randn(m, k, device=device).to(half(device))
        numbers = torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8)
        for group, zeros in ((128, False), (128, True), (32, False)):
            scales = (torch.rand(n, k // group, device=device) * 0.01).to(half(device))
            points = torch.randint(0, 16, scales.shape, device=device) if zeros else None
            weight = pack(numbers, scales, points, group)
            size = n * k // 2 + scales.nbytes + (scales.numel() if zeros else 0) + 2 * m * (n + k)
            name = f"int4-{group}{'-zeros' if zeros else ''} m={m} n={n} k={k}"
            yield Case(name, partial(multiply, x, weight), size, 2 * m * n * k)
