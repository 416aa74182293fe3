"""The product of one row with a matrix of 16 or 32 bits: all of its time is that of reading the matrix.

A program reads some of the matrix's rows, a stretch of each at a time, and adds up products with the vector in float32;
what its threads hold is added up once, at the end. The tensor cores have nothing to do here, and the libraries' kernels
for them leave most of the device idle where the matrix is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from ferrule_kernels.cuda.cases import Case

# Of a stretch: 64 bytes for each thread. On an H200 this is within 3 % of the best for the matrices of models.
_ROWS, _DEPTH = 4, 1024


@triton.jit
def _multiply(x, w, bias, out, n, k, w_stride, ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(rows, n - 1)  # rows past the last read the last one
    inner = tl.arange(0, DEPTH)
    at = w + row.to(tl.int64)[:, None] * w_stride + inner[None, :]
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for start in range(0, k, DEPTH):
        if EVEN:
            a, b = tl.load(at + start), tl.load(x + start + inner)
        else:
            inside = inner < k - start
            a = tl.load(at + start, mask=inside[None, :], other=0.0)
            b = tl.load(x + start + inner, mask=inside, other=0.0)
        total += a.to(tl.float32) * b.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < n)


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [1, k] by the transposed weight [n, k], whose rows are each contiguous: [1, n] of x's type."""
    n, k = weight.shape
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    _multiply[(triton.cdiv(n, _ROWS),)](
        x.contiguous(),
        weight,
        bias,
        out,
        n,
        k,
        weight.stride(0),
        ROWS=_ROWS,
        DEPTH=_DEPTH,
        EVEN=k % _DEPTH == 0,
        num_warps=4,
    )
    return out


def cases(device: torch.device) -> Iterator[Case]:
    """Yield cases of the products of one layer of 0.6B and 8B models, and of their output heads."""
    real = device.type == "cuda"
    half = torch.bfloat16 if real else torch.float32
    shapes = ((4096, 1024), (1024, 3072), (151936, 1024), (6144, 4096), (4096, 14336), (28672, 4096))
    for n, k in shapes if real else ((40, 72),):
        x, weight = torch.randn(1, k, device=device).to(half), torch.randn(n, k, device=device).to(half)
        yield Case(f"one row n={n} k={k}", partial(multiply, x, weight, None), weight.nbytes + x.nbytes, 2 * n * k)
