"""Products with weights of 8 bits, integers or fp8 (e4m3), and activations of the same type or of 16 or 32 bits.

`native` uses the tensor cores for 8 bits: int8 since compute capability 7.5, fp8 since 8.9. Integers are summed in 32
bits and exactly; fp8 in float32, in steps of 128 inputs whose sums are added outside the tensor cores, because sums
within them are less precise on Hopper. `widened` widens weights to the type of the activations, in registers, where a
device has no such units or where activations must not be rounded to 8 bits. With many rows it writes the widened
weights to memory once, and torch computes the product.

Moving the bits of an fp8 number to the exponent and mantissa of a wider type gives that number times a power of two,
for subnormal numbers too. So devices without conversions of fp8 can read it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from ferrule_kernels.cuda.products import SWATHE, VARYING, Tile, add, cut, finished, fitting, place
from ferrule_kernels.cuda.widening import from_fp8, from_int8, packed

STEP = 128  # inputs of a group that has a scale, in either factor
MANY = 512  # rows from which weights are widened into memory


@triton.jit(do_not_specialize=VARYING)
def _native(
    x,  # [m, k]
    w,  # [n, k]
    row_scales,  # [m], or [m, groups] where grouped
    column_scales,  # [n], or [ceil(n / TALL), groups]
    bias,
    out,  # [m, n], or [splits, m, n]
    m,
    n,
    k,
    steps,  # of a split
    GROUPED: tl.constexpr,
    TALL: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWATHE: tl.constexpr,
):
    down, across = place(tl.program_id(0), m, n, ROWS, COLUMNS, SWATHE)
    rows, columns = down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)
    # Rows and columns past the last read the last one; their sums are dropped.
    row, column = tl.minimum(rows, m - 1), tl.minimum(columns, n - 1)
    inner = tl.arange(0, DEPTH)
    x_at = x + row.to(tl.int64)[:, None] * k + inner[None, :]
    w_at = w + column.to(tl.int64)[None, :] * k + inner[:, None]
    groups = tl.cdiv(k, DEPTH)
    first = tl.program_id(1) * steps
    total = tl.zeros((ROWS, COLUMNS), tl.int32 if WHOLE else tl.float32)
    for step in range(first, tl.minimum(first + steps, groups)):
        if EVEN:
            a, b = tl.load(x_at + step * DEPTH), tl.load(w_at + step * DEPTH)
        else:
            left = k - step * DEPTH
            a = tl.load(x_at + step * DEPTH, mask=inner[None, :] < left, other=0.0)
            b = tl.load(w_at + step * DEPTH, mask=inner[:, None] < left, other=0.0)
        if WHOLE:
            total = tl.dot(a, b, total, out_dtype=tl.int32)
        elif GROUPED:
            scales = tl.load(row_scales + row * groups + step)[:, None]
            scales = scales * tl.load(column_scales + column // TALL * groups + step)[None, :]
            total += tl.dot(a, b) * scales
        else:
            total = tl.dot(a, b, total, max_num_imprecise_acc=DEPTH)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    at = rows.to(tl.int64)[:, None] * n + columns[None, :]
    if SPLIT:
        tl.store(out + tl.program_id(1).to(tl.int64) * m * n + at, total, mask=inside)
    else:
        if GROUPED:
            y = finished(total, None, None, bias, rows, columns, m, n)
        else:
            y = finished(total, row_scales, column_scales, bias, rows, columns, m, n)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def native_tile(rows: int, device: torch.device) -> Tile:
    """Choose the tile for a number of rows.

    With few rows, reading the weights takes the time: many low tiles read at once. A step is 128 inputs, a whole line
    of the cache: the longest that fp8's sums are left to the units for.
    """
    if rows <= 16:
        tile = Tile(16, 128, STEP, warps=4, stages=3)
    elif rows <= 64:
        tile = Tile(64, 64, STEP, warps=4, stages=4)
    else:
        tile = Tile(128, 128, STEP, warps=8, stages=4)
    return fitting(tile, (tile.rows + tile.columns) * tile.depth, device)


def native(
    x: tuple[torch.Tensor, torch.Tensor],
    w: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tall: int = 0,
    num_splits: int = 0,
) -> torch.Tensor:
    """Multiply numbers [m, k] by the transposed [n, k], of one type, each with float32 scales: [m, n] of `dtype`.

    Scales are [m, 1] and [n] or [n, 1]; with `tall` they are of groups of 128 inputs, [m, groups] and [ceil(n / tall),
    groups]. `num_splits` is chosen if it is 0.
    """
    (numbers, row_scales), (weight, column_scales) = x, w
    (m, k), n = numbers.shape, weight.shape[0]
    out = torch.empty((m, n), dtype=dtype, device=numbers.device)
    if not m:
        return out
    tile, whole = native_tile(m, numbers.device), numbers.dtype == torch.int8
    made = cut(tile, m, n, k, numbers.device, num_splits)
    to = made.sums(out, torch.int32 if whole else torch.float32)
    _native[(made.tiles, made.parts)](
        numbers,
        weight,
        row_scales,
        column_scales,
        bias,
        to,
        m,
        n,
        k,
        made.per,
        GROUPED=tall > 0,
        TALL=max(tall, 1),
        WHOLE=whole,
        SPLIT=made.parts > 1,
        EVEN=k % tile.depth == 0,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        SWATHE=SWATHE,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if made.parts > 1:
        add(to, out, None if tall else row_scales, None if tall else column_scales, bias)
    return out


# ------------------------------------------------------------------------------------------- widened


@triton.jit
def _wide(raw, like: tl.constexpr, FP8: tl.constexpr, PACKED: tl.constexpr):
    """Convert bytes to numbers of the type of `like`: int8 exactly; fp8 exactly too, but in float16 divided by 256."""
    if PACKED:
        wide = from_fp8(raw, like) if FP8 else from_int8(raw, like)
    elif FP8:
        bits = raw.to(tl.int32)
        sign, rest = bits & 0x80, bits & 0x7F
        if like == tl.float16:  # an exponent's bias is 15, not 7; a factor of the product restores it
            wide = ((sign << 8) | (rest << 7)).to(tl.int16).to(tl.float16, bitcast=True)
        else:  # 2^120: the bias is 127
            wide = (((sign << 24) | (rest << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36).to(like)
    else:
        wide = raw.to(like)
    return wide


@triton.jit(do_not_specialize=VARYING)
def _widened(
    x,  # [m, k]
    w,  # [n, k] int8, or uint8 that holds fp8
    scales,  # [n], or [ceil(n / TALL), groups]
    bias,
    out,
    m,
    n,
    k,
    steps,
    FACTOR: tl.constexpr,
    FP8: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    TALL: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWATHE: tl.constexpr,
):
    # The weights are the left factor: on Hopper that one may come from registers, where it was widened.
    down, across = place(tl.program_id(0), m, n, ROWS, COLUMNS, SWATHE)
    rows, columns = down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)
    row, column = tl.minimum(rows, m - 1), tl.minimum(columns, n - 1)
    inner = tl.arange(0, DEPTH)
    x_at = x + row.to(tl.int64)[None, :] * k + inner[:, None]
    w_at = w + column.to(tl.int64)[:, None] * k + inner[None, :]
    groups = tl.cdiv(k, 128)
    first = tl.program_id(1) * steps
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in range(first, tl.minimum(first + steps, tl.cdiv(k, DEPTH))):
        if EVEN:
            a, b = tl.load(w_at + step * DEPTH), tl.load(x_at + step * DEPTH)
        else:
            left = k - step * DEPTH
            a = tl.load(w_at + step * DEPTH, mask=inner[None, :] < left, other=0)
            b = tl.load(x_at + step * DEPTH, mask=inner[:, None] < left, other=0.0)
        a = _wide(a, x.dtype.element_ty, FP8, PACKED)
        if GROUPED:
            scale = tl.load(scales + column // TALL * groups + step * DEPTH // 128)
            total += tl.dot(a, b, input_precision="ieee") * scale[:, None]
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
    total = tl.trans(total) * FACTOR
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    at = rows.to(tl.int64)[:, None] * n + columns[None, :]
    if SPLIT:
        tl.store(out + tl.program_id(1).to(tl.int64) * m * n + at, total, mask=inside)
    else:
        if GROUPED:
            y = finished(total, None, None, bias, rows, columns, m, n)
        else:
            y = finished(total, None, scales, bias, rows, columns, m, n)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _widen(
    w,
    scales,
    out,
    n,
    k,
    FACTOR: tl.constexpr,
    FP8: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    TALL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (columns < n)[:, None] & (inner < k)[None, :]
    at = columns.to(tl.int64)[:, None] * k + inner[None, :]
    scale_at = columns // TALL * tl.cdiv(k, 128) + tl.program_id(1) if GROUPED else columns
    scale = tl.load(scales + scale_at, mask=columns < n, other=0.0) * FACTOR
    wide = _wide(tl.load(w + at, mask=inside, other=0), out.dtype.element_ty, FP8, PACKED).to(tl.float32)
    tl.store(out + at, (wide * scale[:, None]).to(out.dtype.element_ty), mask=inside)


def widen(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, tall: int = 0) -> torch.Tensor:
    """Return weights [n, k], int8 or fp8, times their scales (as in `native`), of `dtype`."""
    fp8, (n, k) = weight.dtype == torch.float8_e4m3fn, weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    _widen[(triton.cdiv(n, 32), triton.cdiv(k, STEP))](
        weight.view(torch.uint8) if fp8 else weight,
        scales,
        out,
        n,
        k,
        FACTOR=_factor(fp8, dtype),
        FP8=fp8,
        PACKED=packed(out.device, dtype),
        GROUPED=tall > 0,
        TALL=max(tall, 1),
        COLUMNS=32,
        num_warps=4,
    )
    return out


def _factor(fp8: bool, dtype: torch.dtype) -> float:
    return 256.0 if fp8 and dtype == torch.float16 else 1.0


def widened_tile(rows: int, x: torch.Tensor) -> Tile:
    """Choose the tile for a number of rows, like `native_tile`, with activations of 2 or 4 bytes."""
    depth = 128 if x.element_size() == 2 else 64
    if rows <= 16:
        tile = Tile(16, 128, depth, warps=4, stages=3)
    elif rows <= 64:
        tile = Tile(64, 64, depth, warps=4, stages=4)
    else:
        tile = Tile(128, 128, depth // 2, warps=8, stages=4)
    return fitting(tile, (tile.rows * x.element_size() + tile.columns) * tile.depth, x.device)


def widened(
    x: torch.Tensor,
    w: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tall: int = 0,
    num_splits: int = 0,
) -> torch.Tensor:
    """Multiply x [m, k], 16 or 32 bits, by weights [n, k] with scales as in `native`: [m, n] of `dtype`."""
    weight, scales = w
    (m, k), n = x.shape, weight.shape[0]
    if m > MANY:
        return F.linear(x, widen(weight, scales, x.dtype, tall), None if bias is None else bias.to(x.dtype)).to(dtype)
    x, out = x.contiguous(), torch.empty((m, n), dtype=dtype, device=x.device)
    if not m:
        return out
    fp8, tile = weight.dtype == torch.float8_e4m3fn, widened_tile(m, x)
    made = cut(tile, m, n, k, x.device, num_splits)
    to = made.sums(out)
    _widened[(made.tiles, made.parts)](
        x,
        weight.view(torch.uint8) if fp8 else weight,
        scales,
        bias,
        to,
        m,
        n,
        k,
        made.per,
        FACTOR=_factor(fp8, x.dtype),
        FP8=fp8,
        PACKED=packed(x.device, x.dtype),
        GROUPED=tall > 0,
        TALL=max(tall, 1),
        SPLIT=made.parts > 1,
        EVEN=k % tile.depth == 0,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        SWATHE=SWATHE,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if made.parts > 1:
        add(to, out, None, None if tall else scales, bias)
    return out
