"""Products with fp8 (e4m3) weights: W8A8, where activations are quantized at run time, and weight-only.

A scale belongs to one output channel (the scale of a whole tensor is repeated), or to a block of 128 inputs by `tall`
output channels, as DeepSeek-V3's checkpoints have them (https://arxiv.org/abs/2412.19437, section 3.3); activations
have a scale for each row in the first case, and for each 128 inputs of a row in the second. Devices before compute
capability 8.9 have no units for fp8: there only `multiply_wide` runs, which reads the same number of bytes and
multiplies in the type of the activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ferrule_kernels.cuda.activations import REACH, quantize
from ferrule_kernels.cuda.cases import Case, half
from ferrule_kernels.cuda.eight_bit import STEP, native, widened
from ferrule_kernels.cuda.int8 import shapes

SINCE = (8, 9)  # the first compute capability with units for fp8


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weight [n, k], of any float type, to fp8 [n, k] and scales float32 [n], one for each output channel."""
    reach = REACH[torch.float8_e4m3fn]
    scales = weight.abs().amax(1).float() / reach
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    return (weight.float() * inverse[:, None]).clamp(-reach, reach).to(torch.float8_e4m3fn), scales


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    tall: int = 0,
    num_splits: int = 0,
) -> torch.Tensor:
    """Multiply x [m, k], quantized on the fly, by the transposed weight fp8 [n, k]: [m, n] of `dtype`, by default x's.

    `scales` are float32 [n], or [ceil(n / tall), ceil(k / 128)] with `tall`.
    """
    numbers = quantize(x, torch.float8_e4m3fn, STEP if tall else 0)
    return native(numbers, (weight, scales), bias, dtype or x.dtype, tall, num_splits)


def multiply_wide(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    tall: int = 0,
    num_splits: int = 0,
) -> torch.Tensor:
    """Multiply like `multiply`, without quantizing x, which is float16, bfloat16 or float32; on any device."""
    return widened(x, (weight, scales), bias, dtype or x.dtype, tall, num_splits)


def cases(device: torch.device) -> Iterator[Case]:
    units = device.type != "cuda" or torch.cuda.get_device_capability(device) >= SINCE
    for m, n, k in shapes(device):
        x = torch.randn(m, k, device=device).to(half(device))
        weight, scales = quantize_weight(torch.randn(n, k, device=device, dtype=half(device)))
        blocks = torch.rand(-(-n // STEP), -(-k // STEP), device=device) * 0.01
        size, flops, at = n * k + 2 * m * (n + k), 2 * m * n * k, f"m={m} n={n} k={k}"
        if units:
            yield Case(f"fp8-w8a8 {at}", partial(multiply, x, weight, scales), size, flops)
            yield Case(f"fp8-blocks {at}", partial(multiply, x, weight, blocks, tall=STEP), size, flops)
        yield Case(f"weight-only-e4m3 {at}", partial(multiply_wide, x, weight, scales), size, flops)
