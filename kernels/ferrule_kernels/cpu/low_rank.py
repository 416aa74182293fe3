"""Sums of products and products of low rank: tensors to the kernel in ``low_rank.cpp``."""

from __future__ import annotations

import ctypes
import functools
from itertools import accumulate
from typing import Any

import torch

from ferrule_kernels.cpu import library
from ferrule_kernels.low_rank import LowRank, check_rows

_TYPES = (torch.float32, torch.bfloat16)
_WEIGHTS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # their numbers in the kernel
_TENSORS = ("down", "up", "ranks", "changed", "scales", "offsets", "rank_scales", "ends")


class _Weights(ctypes.Structure):
    """`LowRank` of the kernel, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _TENSORS),
        *((name, ctypes.c_int64) for name in ("groups", "projections", "max_rank", "inputs", "outputs")),
        *((name, ctypes.c_int32) for name in ("type", "table")),
    ]


@functools.cache
def _kernel() -> Any:
    """Load the kernel and declare its types. Raises KernelsUnavailableError."""
    kernel, at, count = library.load().ferrule_low_rank, ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = (at, at, at, at, count, ctypes.c_int32)
    kernel.restype = None
    return kernel


class LowRankSum:
    """The kernel for some weights, float32, bfloat16 or int8, as `ferrule_kernels.low_rank.add`.

    It reads ranks when it runs, also in each replay of a recording. Raises KernelsUnavailableError.
    """

    def __init__(self, weights: LowRank) -> None:
        if weights.down.dtype not in _WEIGHTS or not weights.down.is_cpu:
            raise ValueError(f"weights are float32, bfloat16 or int8 on the CPU, not {weights.down.dtype}")
        self._kernel, self._weights = _kernel(), weights
        self._ends = (ctypes.c_int64 * len(weights.outputs))(*accumulate(weights.outputs))
        self._structure = _Weights(
            *(tensor.data_ptr() for tensor in weights.tensors()),
            ctypes.addressof(self._ends),
            weights.groups,
            len(weights.outputs),
            weights.max_rank,
            weights.inputs,
            sum(weights.outputs),
            _WEIGHTS[weights.down.dtype],
            weights.table,
        )
        self._address = ctypes.addressof(self._structure)

    @classmethod
    def of(cls, weights: LowRank) -> LowRankSum | None:
        """Make the kernel for some weights, or return None for those of another type."""
        return cls(weights) if weights.down.is_cpu and weights.down.dtype in _WEIGHTS else None

    def __call__(self, x: torch.Tensor, y: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        check_rows(self._weights, x, y, groups)
        if self._weights.table:
            x = x.long().contiguous()
        else:
            x = (x if x.dtype in _TYPES else x.float()).contiguous()
        given = y
        y = (y if y.dtype in _TYPES else y.float()).contiguous()
        groups = groups.contiguous()
        narrow = int(x.dtype == torch.bfloat16) + 2 * int(y.dtype == torch.bfloat16)
        self._kernel(self._address, groups.data_ptr(), x.data_ptr(), y.data_ptr(), len(y), narrow)
        return given if y is given else given.copy_(y)
