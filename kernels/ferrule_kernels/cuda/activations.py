"""Quantization of activations to 8 bits at run time, with one scale for each row or group of a row's inputs.

A group whose activations are all below 1e-30 has a scale of zero; one that holds NaN or infinity has a scale of NaN,
so that the results of that row are NaN and those of other rows are not affected.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from ferrule_kernels.cuda.cases import Case, half
from ferrule_kernels.cuda.tiles import power_of_2, warps

REACH = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest number of each type
_TINY = tl.constexpr(1e-30)
_INFINITY = tl.constexpr(0x7F800000)
_NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken off, it rounds to nearest, ties to even
_SMALL = tl.constexpr(24576.0)  # 1.5 * 2^14: added, it leaves multiples of 2^-9, the least number of fp8
_SMALL_BITS = tl.constexpr(0x46C00000)  # of that number
_LEAST = tl.constexpr(0x3C800000)  # of 2^-6, below which numbers of fp8 are multiples of the least
_WIDEST = 4096  # elements of a row that are in flight together
_TOGETHER = 8  # groups of one program


@triton.jit
def _magnitude(x):
    """Return the bits of |x| as integers, which sort like |x|. NaN is the largest; a maximum of floats may drop it."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(bits, REACH: tl.constexpr):
    """Return the scale for a largest magnitude with these bits, and its inverse; zero where a scale is unusable."""
    most = bits.to(tl.float32, bitcast=True)
    used = (bits < _INFINITY) & (most > _TINY)
    inverse = tl.where(used, REACH / tl.where(used, most, 1.0), 0.0)
    scale = tl.where(used, most / REACH, 0.0)
    return tl.where(bits < _INFINITY, scale, float("nan")), inverse


@triton.jit
def _numbers(x, inverse, WHOLE: tl.constexpr):
    """Round x * inverse to integers, or to the bits of fp8 numbers: to nearest, ties to even.

    The arithmetic is spelled out, as not all devices' conversions round alike.
    """
    y = tl.where(inverse == 0.0, 0.0, x * inverse)
    if WHOLE:
        made = ((y + _NEAREST) - _NEAREST).to(tl.int8)
    else:
        bits = y.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # 3 bits of mantissa, a bias of 7
        small = (tl.abs(y) + _SMALL).to(tl.int32, bitcast=True) - _SMALL_BITS  # multiples of 2^-9
        number = tl.minimum(tl.where(size < _LEAST, small, normal), 0x7E)
        made = (((bits >> 24) & 0x80) | number).to(tl.uint8)
    return made


@triton.jit
def _rows(x, numbers, scales, k, stride, REACH: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    bits = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, k, BLOCK):
        part = tl.load(x + row * stride + first + inner, mask=first + inner < k, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, _magnitude(part))
    scale, inverse = _scale(tl.max(bits, 0), REACH)
    tl.store(scales + row, scale)
    for first in range(0, k, BLOCK):
        inside = first + inner < k
        part = tl.load(x + row * stride + first + inner, mask=inside, other=0.0).to(tl.float32)
        y = _numbers(part, inverse, WHOLE)
        tl.store(numbers + row * k + first + inner, y, mask=inside)


@triton.jit
def _groups(
    x,
    numbers,
    scales,
    k,
    stride,
    groups,
    REACH: tl.constexpr,
    WHOLE: tl.constexpr,
    COUNT: tl.constexpr,
    G: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    inner = group[:, None] * G + tl.arange(0, G)[None, :]
    part = tl.load(x + row * stride + inner, mask=inner < k, other=0.0).to(tl.float32)
    scale, inverse = _scale(tl.max(_magnitude(part), 1), REACH)
    tl.store(scales + row * groups + group, scale, mask=group < groups)
    y = _numbers(part, inverse[:, None], WHOLE)
    tl.store(numbers + row * k + inner, y, mask=inner < k)


def quantize(x: torch.Tensor, dtype: torch.dtype, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [m, k] to numbers of `dtype` (int8, float8_e4m3fn) [m, k], and scales float32 [m, groups].

    `group` is a power of two that counts inputs; 0 is a whole row.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    m, k = x.shape
    numbers = torch.empty((m, k), dtype=dtype, device=x.device)
    groups = -(-k // group) if group else 1
    scales = torch.empty((m, groups), dtype=torch.float32, device=x.device)
    whole = dtype == torch.int8
    cells = numbers if whole else numbers.view(torch.uint8)
    given = {"REACH": REACH[dtype], "WHOLE": whole}
    if not m:
        return numbers, scales
    if group:
        grid = (m, triton.cdiv(groups, _TOGETHER))
        _groups[grid](x, cells, scales, k, x.stride(0), groups, COUNT=_TOGETHER, G=group, num_warps=4, **given)
        return numbers, scales
    block = min(power_of_2(k), _WIDEST)
    _rows[(m,)](x, cells, scales, k, x.stride(0), BLOCK=block, num_warps=warps(block), **given)
    return numbers, scales


def cases(device: torch.device) -> Iterator[Case]:
    """Yield cases with rows of Llama-3.1-8B's hidden states."""
    k = 4096 if device.type == "cuda" else 256
    for m in (16, 8192) if device.type == "cuda" else (2,):
        x = torch.randn(m, k, device=device).to(half(device))
        for name, dtype, group in (
            ("int8", torch.int8, 0),
            ("fp8", torch.float8_e4m3fn, 0),
            ("fp8-128", torch.float8_e4m3fn, 128),
        ):
            yield Case(f"quantize-{name} m={m}", partial(quantize, x, dtype, group), m * k * 3)
