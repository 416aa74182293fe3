"""Products with bfloat16 weights: tensors to the kernel in ``dense.cpp``."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ferrule_kernels.cpu import library
from ferrule_kernels.cpu.pages import weight_memory

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
STEP = 32  # inputs are rounded up to it
LANES = 16  # and channels to this


class _Matrix(ctypes.Structure):
    """`DenseMatrix` of the kernel, field by field."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
    ]


class _Kernels(NamedTuple):
    pack: Any
    turn: Any
    multiply: Any
    rows: Any
    unit: int


@functools.cache
def _kernels() -> _Kernels:
    """Load the kernels and declare their types. Raises KernelsUnavailableError."""
    loaded, at, count = library.load(), ctypes.c_void_p, ctypes.c_int64
    loaded.ferrule_dense_pack.argtypes = (at, at, count)
    loaded.ferrule_dense.argtypes = (at, at, at, count, ctypes.c_int32)
    loaded.ferrule_dense_rows.argtypes = (at, at, count, at, count)
    loaded.ferrule_dense_turn.argtypes = (at,)
    pack, turn, multiply, rows = (getattr(loaded, f"ferrule_dense{name}") for name in ("_pack", "_turn", "", "_rows"))
    pack.restype = turn.restype = multiply.restype = None
    rows.restype = count
    return _Kernels(pack, turn, multiply, rows, loaded.ferrule_dense_unit())


def unit() -> str | None:
    """Return the instructions that multiply here, "amx", "avx512_bf16" or "fma", or None.

    "fma" is AVX2 or AVX-512 on widened floats.
    """
    try:
        return (None, "fma", "avx512_bf16", "amx")[_kernels().unit]
    except library.KernelsUnavailableError:
        return None


class DenseMatrix:
    """A bfloat16 weight [n, k] in the kernel's order. Raises KernelsUnavailableError.

    With `in_place` the packed form takes the memory of `weight`, which must not be read afterwards, if both have the
    same size: n is a multiple of 16 and k of 32. So packing needs no memory beside the weights. `packed` is the packed
    form; ``ferrule_kernels.cpu.packed`` has the version of its layout, for files.
    """

    packed: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, in_place: bool = False) -> None:
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"a dense matrix is of bfloat16, not {weight.dtype}")
        source = weight.detach().contiguous()
        outputs, inputs = source.shape
        count = self.packed_count(outputs, inputs)
        reuse = in_place and source.numel() == count
        self._set_up(source.view(-1) if reuse else weight_memory((count,), torch.bfloat16), (outputs, inputs), bias)
        _kernels().pack(self._address, source.data_ptr(), self.inputs)

    @classmethod
    def of_packed(
        cls, packed: torch.Tensor, shape: tuple[int, int], bias: torch.Tensor | None = None, turn: bool = False
    ) -> DenseMatrix:
        """Make a matrix of `shape` from bytes in the kernel's order: the `packed` of an earlier matrix.

        With `turn`, that matrix was packed on a processor with the other of `ferrule_kernels.cpu.packed.LAYOUTS`;
        `packed` is then converted in place. Raises ValueError for another type or size.
        """
        wanted = cls.packed_count(*shape)
        if packed.dtype != torch.bfloat16 or tuple(packed.shape) != (wanted,):
            raise ValueError(f"a packed weight {shape} is bfloat16 [{wanted}], not {packed.dtype} {list(packed.shape)}")
        made = cls.__new__(cls)
        made._set_up(packed.contiguous(), shape, bias)
        if turn:
            _kernels().turn(made._address)
        return made

    def _set_up(self, packed: torch.Tensor, shape: tuple[int, int], bias: torch.Tensor | None) -> None:
        self._multiply, self._rows = _kernels().multiply, _kernels().rows
        self.outputs, self.inputs = shape
        self._padding = -self.inputs % STEP
        self.packed = packed
        self._bias = None if bias is None else F.pad(bias.detach().float(), (0, -self.outputs % LANES))
        at = None if self._bias is None else self._bias.data_ptr()
        self._matrix = _Matrix(packed.data_ptr(), at, self.outputs, self.inputs + self._padding)
        self._address = ctypes.addressof(self._matrix)

    @property
    def address(self) -> int:
        """Address of the kernel's structure, valid as long as this matrix lives."""
        return self._address

    @staticmethod
    def packed_count(outputs: int, inputs: int) -> int:
        """Return how many numbers a packed weight has, including padding."""
        return (outputs + -outputs % LANES) * (inputs + -inputs % STEP)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return every tensor that the kernel reads."""
        return (self.packed,) if self._bias is None else (self.packed, self._bias)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def multiply(self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Multiply x [m, k], rounded to bfloat16, by the transposed weight: [m, n] of `dtype`, bfloat16 or float32."""
        if x.dtype != torch.bfloat16:
            x = x.bfloat16()
        x = F.pad(x, (0, self._padding)) if self._padding else x.contiguous()
        m = x.shape[0]
        y = torch.empty((m, self.outputs), dtype=dtype)
        self._multiply(self._address, x.data_ptr(), y.data_ptr(), m, _TYPES[dtype])
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows `ids` [tokens] of the weight, [tokens, k], with their original values. Raises IndexError."""
        ids = ids.long().contiguous()
        y = torch.empty((*ids.shape, self.inputs), dtype=torch.bfloat16)
        check_rows(ids, self._rows(self._address, ids.data_ptr(), ids.numel(), y.data_ptr(), self.inputs), self.outputs)
        return y


def check_rows(ids: torch.Tensor, read: int, count: int) -> None:
    """Check that a kernel has read all rows that `ids` asked for of a matrix with `count` rows. Raises IndexError."""
    if read < ids.numel():
        raise IndexError(f"row {ids.flatten()[read].item()} does not exist: the matrix has {count} rows")
