"""Codes of float weights by the numbers of a table: tensors to the kernel in ``codes.cpp``."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from ferrule_kernels.cpu.elementwise import functions

_INT, _AT = ctypes.c_int64, ctypes.c_void_p
_CONVERTED = 1 << 22  # weights that are converted at a time


@functools.cache
def _kernels() -> dict[torch.dtype, Any]:
    """Load the kernel for each type. Raises KernelsUnavailableError."""
    return functions("ferrule_encode", _AT, _INT, _INT, _INT, _AT, _INT, _AT, _AT)


def encode(weight: torch.Tensor, table: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode weight [n, k] as codes uint8 [n, k] and scales float32 [n, k / group]. Raises KernelsUnavailableError.

    A group's scale is its largest magnitude, or NaN if the group holds one. A code is the index in the sorted `table`
    of the number nearest to weight / scale; of two equally near, the lower. Raises ValueError if k is not a multiple of
    `group`.
    """
    n, k = weight.shape
    if k % group:
        raise ValueError(f"{k} inputs are not a multiple of {group}")
    kernels = _kernels()
    table = table.float()
    borders = (table[1:] + table[:-1]) / 2
    codes, scales = torch.empty((n, k), dtype=torch.uint8), torch.empty((n, k // group))
    rows = n if weight.dtype in kernels else max(1, _CONVERTED // max(1, k))
    for first in range(0, n, rows or 1):
        part = weight[first : first + rows].detach()
        part = (part if part.dtype in kernels else part.float()).contiguous()
        made = codes[first:].data_ptr(), scales[first:].data_ptr()
        kernels[part.dtype](part.data_ptr(), len(part), k, group, borders.data_ptr(), len(borders), *made)
    return codes, scales
