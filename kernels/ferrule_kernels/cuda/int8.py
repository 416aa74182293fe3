"""Products with int8 weights: W8A8, where rows of activations are quantized at run time, and weight-only.

W8A8 sums integers, exactly, so a row's result has the same bits alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ferrule_kernels.cuda.activations import quantize
from ferrule_kernels.cuda.cases import Case, half
from ferrule_kernels.cuda.eight_bit import native, widened

LONGEST = 131072  # inputs: the sum of a row must fit 32 bits


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    num_splits: int = 0,
) -> torch.Tensor:
    """Multiply x [m, k], quantized row by row, by the transposed weight int8 [n, k] with scales float32 [n].

    Returns [m, n] of `dtype`, by default x's.
    """
    return native(quantize(x, torch.int8), (weight, scales), bias, dtype or x.dtype, num_splits=num_splits)


def multiply_wide(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    num_splits: int = 0,
) -> torch.Tensor:
    """Multiply like `multiply`, without quantizing x, which is float16, bfloat16 or float32."""
    return widened(x, (weight, scales), bias, dtype or x.dtype, num_splits=num_splits)


def shapes(device: torch.device) -> Iterator[tuple[int, int, int]]:
    """Yield (m, n, k) of Llama-3.1-8B's layers: a single request, a batch, and a long prompt. Small without a GPU."""
    if device.type != "cuda":
        yield 2, 64, 256
        return
    for m in (1, 16, 8192):
        for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
            yield m, n, k


def cases(device: torch.device) -> Iterator[Case]:
    for m, n, k in shapes(device):
        x = torch.randn(m, k, device=device).to(half(device))
        weight = torch.randint(-127, 128, (n, k), device=device, dtype=torch.int8)
        scales = torch.rand(n, device=device) * 0.01
        size, flops = n * k + 2 * m * (n + k), 2 * m * n * k
        yield Case(f"int8-w8a8 m={m} n={n} k={k}", partial(multiply, x, weight, scales), size, flops)
        yield Case(f"int8-weight-only m={m} n={n} k={k}", partial(multiply_wide, x, weight, scales), size, flops)
