"""Packed matrices in files: which order their bytes have, and the memory that they are read into."""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import torch

from ferrule_kernels.cpu import dense

_LARGE = 4 << 20  # bytes


# Of the bytes of `DenseMatrix.packed` and `PackedMatrix.packed`, by their number in files: that of processors without
# tile registers, and with them. Both are read everywhere. An order that changes takes a new number.
LAYOUTS = (1, 2)


def layout() -> int:
    """What is packed in here."""
    return LAYOUTS[dense.unit() == "amx"]


def room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor. A large one asks for large pages, where the system has them, before it is written."""
    count = prod(shape)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or count * dtype.itemsize < _LARGE:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them: pages are small
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)  # which keeps `memory`
