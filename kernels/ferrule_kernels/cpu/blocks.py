"""Blocks of GGUF files, and packed words: tensors to the kernels in ``blocks.cpp``. Types have ggml's numbers."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch

from ferrule_kernels.cpu import library
from ferrule_kernels.matmul import Levels

_INT, _AT = ctypes.c_int64, ctypes.c_void_p
WIDENED = (torch.float32, torch.bfloat16)


class Shape(ctypes.Structure):
    """`BlockShape` of the kernel."""

    _fields_ = [(name, ctypes.c_int32) for name in ("bytes", "numbers", "groups", "offsets")]


class _Parts(ctypes.Structure):
    """`BlockParts` of the kernel."""

    _fields_ = [(name, _AT) for name in ("numbers", "scales", "offsets", "steps", "offset_steps")]


class _Kernels(NamedTuple):
    shape: Any
    read: Any
    widen: Any
    unpack: Any


@functools.cache
def _kernels() -> _Kernels:
    """Load the kernels and declare their types. Raises KernelsUnavailableError."""
    loaded = library.load()
    shape, read, widened = loaded.ferrule_block_shape, loaded.ferrule_blocks_read, loaded.ferrule_blocks_widen
    rows = (ctypes.c_int32, _AT, _INT, _INT, _INT)
    shape.argtypes, shape.restype = (ctypes.c_int32, _AT), ctypes.c_int
    read.argtypes, read.restype = (*rows, _AT), None
    widened.argtypes, widened.restype = (*rows, _AT, ctypes.c_int32, _AT), None
    unpacked = loaded.ferrule_unpack
    unpacked.argtypes, unpacked.restype = (_AT, _INT, ctypes.c_int32, _AT, _AT), None
    return _Kernels(shape, read, widened, unpacked)


def read(kind: int, rows: torch.Tensor) -> tuple[torch.Tensor, Levels, Levels | None]:
    """Read blocks uint8 [n, bytes] as numbers or codes int8 [n, k], their scales, and offsets where the type has them.

    Raises ValueError for an unknown type and for rows that are not whole blocks; KernelsUnavailableError.
    """
    shape, n, blocks, told = given(kind, rows)
    numbers = torch.empty((n, blocks * shape.numbers), dtype=torch.int8)

    def levels() -> Levels:
        steps = torch.empty((n, blocks * shape.groups), dtype=torch.int8) if shape.groups else None
        return Levels(torch.empty((n, blocks)), steps)

    scales, offsets = levels(), levels() if shape.offsets else None
    own = offsets or Levels(torch.empty(0))
    found = (numbers, scales.floats, own.floats, scales.steps, own.steps)
    parts = _Parts(*(None if each is None else each.data_ptr() for each in found))
    _kernels().read(*told, ctypes.addressof(parts))
    return numbers, scales, offsets


def widen(kind: int, rows: torch.Tensor, to: torch.Tensor, table: tuple[int, ...] = ()) -> None:
    """Write the values of blocks uint8 [n, bytes] as floats to `to` [n, k], contiguous and of a type in `WIDENED`.

    `table` holds the numbers that codes stand for. Raises ValueError and KernelsUnavailableError as `read` does, and
    ValueError for another shape or type of `to`.
    """
    shape, n, blocks, told = given(kind, rows)
    if to.shape != (n, blocks * shape.numbers) or to.dtype not in WIDENED or not to.is_contiguous():
        raise ValueError(f"blocks of {n} rows do not become {to.dtype} {list(to.shape)}")
    if table and len(table) != 16:
        raise ValueError(f"a table has 16 numbers, not {len(table)}")
    codes = (ctypes.c_int8 * 16)(*table) if table else None
    _kernels().widen(*told, codes, to.dtype == torch.bfloat16, to.data_ptr())


def takes(rows: torch.Tensor) -> bool:
    """Return whether the kernels are compiled and can read this tensor's memory."""
    return rows.is_cpu and library.available()


def unpack(words: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Unpack the numbers of `bits` bits, lowest first, in words int32 [n, words]: uint8 [n, numbers].

    With an `order`, number i of each group of eight belongs at place order[i]. Raises ValueError for rows that are not
    whole groups of eight, and for an `order` that is not a permutation; KernelsUnavailableError.
    """
    if order and sorted(order) != list(range(8)):
        raise ValueError(f"{order} is not a permutation of the places 0 to 7")
    if not 1 <= bits <= 8 or words.dtype != torch.int32 or not words.is_cpu or words.shape[1] * 4 % bits:
        raise ValueError(f"{words.dtype} {list(words.shape)} are not groups of eight numbers of {bits} bits")
    words, found = words.contiguous(), torch.empty((len(words), words.shape[1] * 32 // bits), dtype=torch.uint8)
    places = (ctypes.c_uint8 * 8)(*(order.index(place) for place in range(8))) if order else None
    _kernels().unpack(words.data_ptr(), words.nbytes // bits, bits, places, found.data_ptr())
    return found


def given(kind: int, rows: torch.Tensor) -> tuple[Shape, int, int, tuple[int, ...]]:
    """Return the shape of a block, the number of rows and of blocks in a row, and the arguments for the kernels.

    Raises the same errors as `read`.
    """
    shape = Shape()
    if not _kernels().shape(kind, ctypes.addressof(shape)):
        raise ValueError(f"no blocks of the type {kind} are read")
    if rows.dtype != torch.uint8 or rows.dim() != 2 or not rows.is_cpu or rows.stride(1) != 1:
        raise ValueError(f"blocks are rows of bytes in memory, not {rows.dtype} {list(rows.shape)}")
    n, (blocks, rest) = len(rows), divmod(rows.shape[1], shape.bytes)
    if rest:
        raise ValueError(f"rows of {rows.shape[1]} bytes are not whole blocks of {shape.bytes}")
    return shape, n, blocks, (kind, rows.data_ptr(), rows.stride(0), n, blocks)
