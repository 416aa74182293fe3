"""RMSNorm and LayerNorm, alone or together with the sum of a residual stream: each in one pass over its rows.

Arithmetic is float32, rounded to the type of the rows where the same norm in single torch operations rounds. A program
holds whole rows in registers, so every element is read once and written once; a row's result has the same bits in any
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from ferrule_kernels.cuda.cases import Case
from ferrule_kernels.cuda.tiles import row_tile


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x,
    y,  # or None
    weight,
    bias,  # or None
    total,
    out,
    rows,
    x_stride,
    y_stride,
    scale,
    eps,
    offset,
    SIZE: tl.constexpr,
    CENTRED: tl.constexpr,  # LayerNorm
    ROUNDED: tl.constexpr,  # before the weights are applied
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < SIZE)
    row = row.to(tl.int64)
    dtype = out.dtype.element_ty
    wide = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
    if y is not None:
        added = tl.load(y + row * y_stride + column, inside, 0.0).to(tl.float32) * scale
        summed = (wide + added.to(dtype).to(tl.float32)).to(dtype)
        tl.store(total + row * SIZE + column, summed, inside)
        wide = summed.to(tl.float32)
    if CENTRED:
        mean = tl.sum(wide, 1) / SIZE
        wide = tl.where(inside, wide - mean[:, None], 0.0)
    wide *= tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)[:, None]
    if ROUNDED:
        wide = wide.to(dtype).to(tl.float32)
    wide *= tl.load(weight + column, column < SIZE, 0.0).to(tl.float32) + offset
    if bias is not None:
        wide += tl.load(bias + column, column < SIZE, 0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, wide.to(dtype), inside)


class _Norm:
    """The common part of both norms. It refers to the parameters themselves, to see memory assigned to them later."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, offset: float, centred: bool
    ) -> None:
        self.weight, self.bias = weight, bias
        self.dtype, self.size = weight.dtype, weight.numel()
        self.eps, self.offset = float(eps), float(offset)
        self._centred = centred
        self._tile = row_tile(self.size)

    def accepts(self, x: torch.Tensor) -> bool:
        return x.dtype is self.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., size], of the weight's type. Returns the same shape."""
        x = _rows(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(x, None, 1.0, None, out)
        return out

    def after(self, x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + scale * y and its norm."""
        x, y = _rows(x), _rows(y)
        total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        self._launch(x, y, scale, total, out)
        return total, out

    def _launch(
        self, x: torch.Tensor, y: torch.Tensor | None, scale: float, total: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        count, (rows, columns, warps) = x.numel() // self.size, self._tile
        _norm_kernel[(triton.cdiv(count, rows),)](
            x,
            y,
            self.weight,
            self.bias,
            total,
            out,
            count,
            _stride(x, self.size),
            0 if y is None else _stride(y, self.size),
            float(scale),
            self.eps,
            self.offset,
            SIZE=self.size,
            CENTRED=self._centred,
            ROUNDED=not self._centred and not self.offset,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
        )


class RMSNorm(_Norm):
    """The norm x / rms(x) * (weight + offset) (Zhang and Sennrich 2019), of rows that have the weight's size and type.

    With an offset, as Gemma has it, the factor is applied before anything is rounded.
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        super().__init__(weight, None, eps, offset, centred=False)


class LayerNorm(_Norm):
    """The norm (x - mean) / std * weight + bias (Ba et al. 2016), of rows that have the weight's size and type."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        super().__init__(weight, bias, eps, 0.0, centred=True)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return x itself where its rows lie a constant stride apart, as columns cut from any matrix do, else a copy."""
    return x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous()


def _stride(x: torch.Tensor, size: int) -> int:
    return x.stride(0) if x.dim() == 2 else size


def cases(device: torch.device) -> Iterator[Case]:
    """Yield cases of decode and prefill at the widths of 0.6B, 8B and 14B models; small for the interpreter."""
    shapes = ((1, 4096), (64, 1024), (64, 4096), (256, 5120), (8192, 4096))
    for rows, size in shapes if device.type == "cuda" else ((4, 96),):
        x, y = (torch.randn(rows, size, dtype=torch.bfloat16, device=device) for _ in range(2))
        weight, bias = (torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(2))
        rms, layer, at = RMSNorm(weight, 1e-6), LayerNorm(weight, bias, 1e-5), f"{rows}x{size}"
        runs: dict[str, tuple[Callable[[], object], int]] = {
            f"rms_norm {at}": (partial(rms, x), 2),
            f"add + rms_norm {at}": (partial(rms.after, x, y, 1.0), 4),
            f"add + layer_norm {at}": (partial(layer.after, x, y, 1.0), 4),
        }
        for name, (run, passes) in runs.items():
            yield Case(name, run, passes * x.nbytes + weight.nbytes)
