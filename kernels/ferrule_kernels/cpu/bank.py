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
    abreast: Any


@functools.cache
def _kernels() -> _Kernels:
    """Load the kernels and declare their types. Raises KernelsUnavailableError."""
    loaded, at, count, kind = library.load(), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    kernels = _Kernels(loaded.ferrule_dense_bank, loaded.ferrule_multiply_bank, loaded.ferrule_multiply_many)
    kernels.dense.argtypes = (at, at, count, at, at, kind, kind)
    kernels.packed.argtypes = (at, at, count, at, at, kind, kind, kind, at)
    kernels.abreast.argtypes = (at, count, kind, kind, at)
    kernels.dense.restype = kernels.packed.restype = kernels.abreast.restype = None
    return kernels


def alike(a: DenseMatrix | PackedMatrix, b: DenseMatrix | PackedMatrix) -> bool:
    """Return whether both matrices can be in one bank."""
    if (a.outputs, a.inputs) != (b.outputs, b.inputs):
        return False
    if isinstance(a, PackedMatrix) and isinstance(b, PackedMatrix):
        return a.form == b.form
    return isinstance(a, DenseMatrix) and isinstance(b, DenseMatrix)


class MatrixBank:
    """Matrices that are all `DenseMatrix` or all `PackedMatrix`, of one shape and form."""

    def __init__(self, matrices: Sequence[DenseMatrix | PackedMatrix]) -> None:
        self._matrices = tuple(matrices)
        self._at = (ctypes.c_void_p * len(matrices))(*(matrix.address for matrix in matrices))
        self._first, self._kernels = matrices[0], _kernels()

    @classmethod
    def of(cls, matrices: Sequence[DenseMatrix | PackedMatrix | None]) -> MatrixBank | None:
        """Make a bank of these matrices, or return None if there are none, any is None, or they are not alike."""
        packed = [matrix for matrix in matrices if matrix is not None]
        if not packed or len(packed) < len(matrices) or not all(alike(packed[0], matrix) for matrix in packed):
            return None
        return cls(packed)

    def multiply(self, x: torch.Tensor, counts: torch.Tensor, results: int, shared: bool = False) -> torch.Tensor:
        """Multiply rows of x by the transposed matrices, each of which gets the next `counts` rows: [results, outputs].

        `counts` int64 [matrices] are read when the kernel runs, also in each replay of a recording; their sum is
        `results`. With `shared`, x has a single row, which stands for every row of every matrix. Results have x's type,
        or bfloat16 where the kernel produces nothing else.
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
        y = torch.empty((results, first.outputs), dtype=made)
        given = self._at, counts.data_ptr(), len(self._matrices), x.data_ptr(), y.data_ptr(), shared
        if isinstance(first, PackedMatrix):
            memory = first.memory(x.shape[0], min(results, len(self._matrices)))
            self._kernels.packed(*given, _TYPES[x.dtype], _TYPES[made], memory)
        else:
            self._kernels.dense(*given, _TYPES[made])
        return y if made == wanted else y.to(wanted)


class Abreast:
    """Quantized matrices of the same inputs, in any forms, whose results stand side by side."""

    def __init__(self, matrices: Sequence[PackedMatrix]) -> None:
        self._matrices, self._multiply = tuple(matrices), _kernels().abreast
        self._outputs = sum(matrix.outputs for matrix in matrices)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [m, inputs] by each transposed matrix: [m, all outputs], of x's type."""
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
