"""Activation functions alone, and gated ones: act(gate) * up in one pass over rows [gate, up].

Arithmetic is float32; the activation is rounded to the rows' type before the product, as torch's composition does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from ferrule_kernels.cuda.cases import Case
from ferrule_kernels.cuda.tiles import power_of_2, warps

_BLOCK = 1024  # columns of a program
# config.json's names, and the function that each is.
GATES = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
    "quick_gelu": "quick_gelu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Apply the activation ACT, a value of `GATES`, to float32 x."""
    if ACT == "silu":
        y = x * tl.sigmoid(x)
    elif ACT == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        y = x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif ACT == "sigmoid":
        y = tl.sigmoid(x)
    elif ACT == "tanh":  # near zero the quotient cancels, and a series does not
        e = tl.exp(-2.0 * tl.abs(x))
        large = (1.0 - e) / (1.0 + e)
        square = x * x
        small = x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 - square * 0.0539682540)))
        y = tl.where(tl.abs(x) < 0.125, small, tl.where(x < 0, -large, large))
    else:
        tl.static_assert(ACT == "relu" or ACT == "relu2", "no such activation")
        y = tl.where(x < 0, 0.0, x)  # a comparison, and not a maximum, keeps what is not a number
        if ACT == "relu2":
            y = y * y
    return y


@triton.jit
def _gate_kernel(x, out, stride, SIZE: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    dtype = out.dtype.element_ty
    y = activate(tl.load(x + row * stride + column, inside, 0.0).to(tl.float32), ACT)
    if GATED:
        up = tl.load(x + row * stride + SIZE + column, inside, 0.0).to(tl.float32)
        y = y.to(dtype).to(tl.float32) * up
    tl.store(out + row * SIZE + column, y.to(dtype), inside)


class Gate:
    """The product act(gate) * up of rows [gate, up]. Raises KeyError for an activation that is not in `GATES`."""

    def __init__(self, activation: str, size: int) -> None:
        self._act, self._size = GATES[activation], size

    def accepts(self, x: torch.Tensor) -> bool:
        return x.dtype in (torch.float32, torch.float16, torch.bfloat16)

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute rows [rows, 2 * size] → [rows, size]."""
        return _run(gate_up, self._act, self._size, gated=True)


class Activation:
    """The activation act(x) of rows [size]. Raises KeyError for an activation that is not in `GATES`."""

    def __init__(self, activation: str, size: int) -> None:
        self._act, self._size = GATES[activation], size

    def accepts(self, x: torch.Tensor) -> bool:
        return x.dtype in (torch.float32, torch.float16, torch.bfloat16)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute rows [rows, size] → [rows, size]."""
        return _run(x, self._act, self._size, gated=False)


def _run(x: torch.Tensor, act: str, size: int, *, gated: bool) -> torch.Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
    block = min(_BLOCK, power_of_2(size))
    grid = (x.shape[0], triton.cdiv(size, block))
    _gate_kernel[grid](x, out, x.stride(0), SIZE=size, ACT=act, GATED=gated, BLOCK=block, num_warps=warps(block))
    return out


def cases(device: torch.device) -> Iterator[Case]:
    """Yield cases of decode and prefill at the inner widths of 0.6B, 8B and 14B models; small for the interpreter."""
    shapes = ((1, 14336), (64, 3072), (64, 14336), (256, 17408), (8192, 14336))
    for rows, size in shapes if device.type == "cuda" else ((4, 96),):
        x = torch.randn(rows, 2 * size, dtype=torch.bfloat16, device=device)
        for act in ("silu", "gelu_pytorch_tanh"):
            yield Case(f"{act} * up {rows}x{size}", partial(Gate(act, size), x), x.nbytes * 3 // 2)
