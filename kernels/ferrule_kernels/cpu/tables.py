"""Products with weights that are looked up in tables: tensors to the kernel in ``tables.cpp``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ferrule_kernels.cpu import library
from ferrule_kernels.cpu.pages import weight_memory
from ferrule_kernels.tables import Additive, Palette, PaletteForm

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_PANEL = 4  # channels of one
_TABLE = 64  # bytes of a channel's table
_VECTOR = 8  # weights of a part of a codebook's entry
_AT_ONCE = 256  # channels whose codes are packed together


class _Matrix(ctypes.Structure):
    """`TableMatrix` of the kernel, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "tables", "factors", "bias")),
        *((name, ctypes.c_int64) for name in ("n", "k")),
        *((name, ctypes.c_int32) for name in ("bits", "books", "entries", "parts")),
    ]


class _Kernels(NamedTuple):
    lanes: Any
    multiply: Any


@functools.cache
def _kernels() -> _Kernels:
    """Load the kernels and declare their types. Raises KernelsUnavailableError."""
    loaded, at, kind = library.load(), ctypes.c_void_p, ctypes.c_int32
    loaded.ferrule_tables_lanes.argtypes = (kind,)
    loaded.ferrule_tables.argtypes = (at, at, at, ctypes.c_int64, ctypes.c_int64, kind, kind)
    loaded.ferrule_tables.restype = None
    return _Kernels(loaded.ferrule_tables_lanes, loaded.ferrule_tables)


def unit(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers are multiplied, for a model of `dtype`. Raises KernelsUnavailableError."""
    return torch.bfloat16 if dtype == torch.bfloat16 and _kernels().lanes(_TYPES[dtype]) else torch.float32


def palette_form(bits: int, dtype: torch.dtype) -> PaletteForm:
    """Return how `TableMatrix` stores a palette for a model of `dtype`. Raises KernelsUnavailableError."""
    multiplied = unit(dtype)
    return PaletteForm(bits, multiplied.itemsize, int(_kernels().lanes(_TYPES[multiplied])))


class TableMatrix:
    """A weight [n, k] that stays codes and tables. Raises KernelsUnavailableError.

    Its numbers are those of a model of `dtype`: a palette's table is rounded to it, and a lone codebook; of
    several, the sums are, where it is bfloat16. The product adds `bias` [n].
    """

    def __init__(self, weight: Palette | Additive, dtype: torch.dtype, bias: torch.Tensor | None = None) -> None:
        self._multiply = _kernels().multiply
        self._dtype = unit(dtype)
        self._lanes = int(_kernels().lanes(_TYPES[self._dtype]))
        self.outputs, self.inputs = weight.shape
        self._padding = -self.inputs % self._lanes
        inputs = self.inputs + self._padding
        factors = None
        if isinstance(weight, Palette):
            bits, books, entries, parts = weight.bits, 0, 1 << weight.bits, 1
            self._tables = self._registers(weight.table.detach().to(dtype))
            self._codes = self._words(weight.codes, bits)
        else:
            books, entries, width = weight.books.shape
            bits, parts = weight.codes.dtype.itemsize * 8, width // _VECTOR
            if weight.problem is not None:
                raise ValueError(weight.problem)
            exact = weight.books.detach().to(dtype) if books == 1 else weight.books.detach()
            self._tables = exact.to(self._dtype if books == 1 else torch.float32).contiguous()
            missing = -(-inputs // width) - weight.codes.shape[1]
            self._codes = F.pad(weight.codes, (0, 0, 0, missing, 0, -self.outputs % _PANEL)).contiguous()
            inputs = self._codes.shape[1] * width
            self._padding = inputs - self.inputs
            factors = None if weight.scales is None else weight.scales.detach().float().contiguous()
        self._factors, self._bias = factors, None if bias is None else bias.detach().float().contiguous()
        places = [_at(each) for each in (self._codes, self._tables, self._factors, self._bias)]
        self._matrix = _Matrix(*places, self.outputs, inputs, bits, books, entries, parts)
        self._address = ctypes.addressof(self._matrix)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return every tensor that the kernel reads."""
        all_of_them = (self._codes, self._tables, self._factors, self._bias)
        return tuple(each for each in all_of_them if each is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def _registers(self, table: torch.Tensor) -> torch.Tensor:
        """Expand a table [n, 8 or 16] to a full register for each channel, by repetition."""
        times = _TABLE // self._dtype.itemsize // table.shape[1]
        return F.pad(table.to(self._dtype).repeat(1, times), (0, 0, 0, -len(table) % _PANEL)).contiguous()

    def _words(self, codes: torch.Tensor, bits: int) -> torch.Tensor:
        """Pack codes uint8 [n, k] into words of all lanes, [panels, blocks, 4, lanes]."""
        kind = torch.int16 if self._dtype == torch.bfloat16 else torch.int32
        fields = kind.itemsize * 8 // bits
        block = fields * self._lanes
        shape = -(-len(codes) // _PANEL), -(-codes.shape[1] // block), _PANEL, self._lanes
        made = weight_memory(shape, kind)
        for first in range(0, len(codes), _AT_ONCE):
            some = codes[first : first + _AT_ONCE]
            some = F.pad(some, (0, -some.shape[1] % block, 0, -len(some) % _PANEL))
            cells = some.view(-1, _PANEL, shape[1], fields, self._lanes).to(torch.int32)
            words = torch.zeros_like(cells[:, :, :, 0])
            for field in range(fields):
                words |= cells[:, :, :, field] << (field * bits)
            made[first // _PANEL : first // _PANEL + len(words)] = words.transpose(1, 2).to(kind)  # the lower half
        return made

    def multiply(
        self, x: torch.Tensor, dtype: torch.dtype | None = None, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply x [m, k] by the transposed weight: [m, n] of `dtype`, by default x's.

        With `into`, float32 or bfloat16 rows that may be part of wider ones, the result is written there instead.
        """
        wanted = dtype or x.dtype
        x = x.to(self._dtype)
        x = F.pad(x, (0, self._padding)) if self._padding else x.contiguous()
        m = x.shape[0]
        y = into
        if y is None:
            y = torch.empty((m, self.outputs), dtype=wanted if wanted in _TYPES else torch.float32)
        kinds = _TYPES[x.dtype], _TYPES[y.dtype]
        self._multiply(self._address, x.data_ptr(), y.data_ptr(), m, y.stride(0), *kinds)
        return y if into is not None or y.dtype == wanted else y.to(wanted)


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class MergedTables:
    """Matrices of the same inputs, whose outputs follow each other: of the projections that a layer merges."""

    def __init__(
        self, weights: Sequence[Palette | Additive], dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> None:
        counts = [weight.shape[0] for weight in weights]
        biases = [None] * len(counts) if bias is None else torch.split(bias, counts)
        pairs = zip(weights, biases, strict=True)
        self._matrices = [TableMatrix(weight, dtype, own) for weight, own in pairs]
        self._ends = list(accumulate(counts, initial=0))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for matrix in self._matrices for tensor in matrix.tensors())

    def multiply(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Multiply x [m, k] by the transposed weights: [m, n] of `dtype`, by default x's."""
        if len(self._matrices) == 1:
            return self._matrices[0].multiply(x, dtype)
        wanted = dtype or x.dtype
        y = torch.empty((x.shape[0], self._ends[-1]), dtype=wanted if wanted in _TYPES else torch.float32)
        for matrix, first, last in zip(self._matrices, self._ends, self._ends[1:], strict=False):
            matrix.multiply(x, into=y[:, first:last])
        return y.to(wanted)
