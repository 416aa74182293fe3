"""Several packed matrices, and products of rows with some of them, or with all, in one call of the kernel."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ferrule_kernels.cpu import library
from ferrule_kernels.cpu.dense import STEP, DenseMatrix
from ferrule_kernels.cpu.matmul import PackedMatrix

_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Kernels(NamedTuple):
    dense: Any
    packed: Any


@functools.cache
def _kernels() -> _Kernels:
    """Raises KernelsUnavailableError."""
    loaded, at, count, kind = library.load(), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    loaded.ferrule_dense_many.argtypes = (at, count, kind)
    loaded.ferrule_multiply_many.argtypes = (at, count, kind, kind, at)
    loaded.ferrule_dense_many.restype = loaded.ferrule_multiply_many.restype = None
    return _Kernels(loaded.ferrule_dense_many, loaded.ferrule_multiply_many)


def alike(a: DenseMatrix | PackedMatrix, b: DenseMatrix | PackedMatrix) -> bool:
    """Whether both can be in one bank."""
    if (a.outputs, a.inputs) != (b.outputs, b.inputs):
        return False
    if isinstance(a, PackedMatrix) and isinstance(b, PackedMatrix):
        return a.form == b.form
    return isinstance(a, DenseMatrix) and isinstance(b, DenseMatrix)


class MatrixBank:
    """Matrices that are all `DenseMatrix` or all `PackedMatrix`, of one shape and form."""

    def __init__(self, matrices: Sequence[DenseMatrix | PackedMatrix]) -> None:
        self._matrices = tuple(matrices)
        self._at = [matrix.address for matrix in matrices]
        self._first, self._kernels = matrices[0], _kernels()

    @classmethod
    def of(cls, matrices: Sequence[DenseMatrix | PackedMatrix | None]) -> MatrixBank | None:
        """None where there is nothing packed, or where they differ."""
        packed = [matrix for matrix in matrices if matrix is not None]
        if not packed or len(packed) < len(matrices) or not all(alike(packed[0], matrix) for matrix in packed):
            return None
        return cls(packed)

    def multiply(
        self, x: torch.Tensor, which: Sequence[int], counts: Sequence[int], shared: bool = False
    ) -> torch.Tensor:
        """Rows of x times the transposed matrices `which`, of which each has the next `counts` rows: [rows, outputs].

        With `shared`, each of them has all rows of x, and the results follow each other. They have x's type, or
        bfloat16 where that is all that the kernel makes.
        """
        first, dtype = self._first, x.dtype
        dense = isinstance(first, DenseMatrix)
        if dense:
            x = x.to(torch.bfloat16)
            x = F.pad(x, (0, -first.inputs % STEP)) if first.inputs % STEP else x.contiguous()
        else:
            x = (x if dtype in _TYPES else x.float()).contiguous()
        wanted = torch.bfloat16 if dense else dtype
        made = wanted if wanted in _TYPES else torch.float32
        y = torch.empty((sum(counts), first.outputs), dtype=made)
        jobs = self._jobs(x, y, which, counts, shared)
        if isinstance(first, PackedMatrix):
            memory = first.memory(x.shape[0] if shared else y.shape[0], len(which))
            self._kernels.packed(jobs, len(which), _TYPES[x.dtype], _TYPES[made], memory)
        else:
            self._kernels.dense(jobs, len(which), _TYPES[made])
        return y if made == wanted else y.to(wanted)

    def _jobs(
        self, x: torch.Tensor, y: torch.Tensor, which: Sequence[int], counts: Sequence[int], shared: bool
    ) -> ctypes.Array[ctypes.c_int64]:
        """For each product the addresses of matrix, x and y, and its rows; of quantized ones the width of y, too."""
        found: list[int] = []
        from_x, to_y = x.data_ptr(), y.data_ptr()
        x_row, y_row = 0 if shared else x.shape[1] * x.element_size(), y.shape[1] * y.element_size()
        for matrix, rows in zip(which, counts, strict=True):
            found += self._at[matrix], from_x, to_y, rows
            if isinstance(self._first, PackedMatrix):
                found.append(y.shape[1])
            from_x, to_y = from_x + rows * x_row, to_y + rows * y_row
        return (ctypes.c_int64 * len(found))(*found)


class Abreast:
    """Quantized matrices of the same inputs, in any forms, whose results stand side by side."""

    def __init__(self, matrices: Sequence[PackedMatrix]) -> None:
        self._matrices, self._multiply = tuple(matrices), _kernels().packed
        self._outputs = sum(matrix.outputs for matrix in matrices)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [m, inputs] times each transposed matrix: [m, all outputs], of x's type."""
        dtype = x.dtype
        x = (x if dtype in _TYPES else x.float()).contiguous()
        y = torch.empty((x.shape[0], self._outputs), dtype=x.dtype)
        jobs: list[int] = []
        to_y, rows = y.data_ptr(), x.shape[0]
        for matrix in self._matrices:
            jobs += matrix.address, x.data_ptr(), to_y, rows, self._outputs
            to_y += matrix.outputs * y.element_size()
        kind = _TYPES[x.dtype]
        memory = PackedMatrix.memory_of(self._matrices, rows)
        self._multiply((ctypes.c_int64 * len(jobs))(*jobs), len(self._matrices), kind, kind, memory)
        return y if dtype == y.dtype else y.to(dtype)
