"""Memory for weights, in huge pages, and other advice to the system about pages."""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from ferrule_kernels.cpu import library

_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call
_INTERLEAVE = 3
_LARGE = 1 << 20  # bytes; the allocator often gives smaller tensors memory that already has its pages
_PIECE = 32 << 20  # bytes that memory for weights is cut from
_HUGE = 2 << 20  # bytes of a page
_LINE = 64  # bytes of a cache's line


@cache
def _library() -> Any:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    number, at, size = ctypes.c_long, ctypes.c_void_p, ctypes.c_ulong
    library.syscall.argtypes, library.syscall.restype = (
        (number, at, size, ctypes.c_int, at, size, ctypes.c_uint),
        number,
    )
    return library


class _Pieces:
    """Memory cut from large pieces, each of which lives as long as anything cut from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = memoryview(b"")

    def cut(self, size: int) -> memoryview:
        with self._lock:
            if size >= _PIECE:
                return _map(size)
            if size > len(self._rest):
                self._rest = _map(_PIECE)
            part, self._rest = self._rest[:size], self._rest[size + -size % _LINE :]
            return part


@cache
def _pieces() -> _Pieces:
    return _Pieces()


def _map(size: int) -> memoryview:
    try:
        memory = mmap.mmap(-1, size + -size % _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes cannot be mapped") if error.errno == errno.ENOMEM else error from error
    with suppress(OSError):  # a system without huge pages: then they are small
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def weight_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make an uninitialised tensor for weights, in huge pages where the system has them. Raises MemoryError.

    Every step reads all weights. Huge pages make it faster, because the processor translates fewer addresses: one row
    takes 0.91 to 0.96 of the time on a Zen 5. The system provides them when memory is first written, for whole ranges
    of 2 MB, so several tensors share a larger piece of new memory.
    """
    count = prod(shape)
    if count * dtype.itemsize < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_pieces().cut(count * dtype.itemsize), dtype=dtype, count=count).view(shape)


def drop_file_pages(tensor: torch.Tensor) -> None:
    """Take the pages of a mapped file that hold `tensor` out of this process; they are read again if they are needed.

    Only for memory that maps a file and was not written to: other memory would lose its contents.
    """
    advice = getattr(mmap, "MADV_DONTNEED", None)
    start, page = tensor.data_ptr(), mmap.PAGESIZE
    first, last = -(-start // page) * page, (start + tensor.nbytes) // page * page  # whole pages alone
    if advice is not None and first < last:
        _library().madvise(first, last - first, advice)


def memory_nodes(sys: Path = Path("/sys/devices/system/node")) -> tuple[int, ...]:
    """Return the NUMA nodes that have memory; empty where the system does not report them."""
    try:
        text = (sys / "has_memory").read_text().strip()
    except OSError:
        return ()
    spans = [part.partition("-") for part in text.split(",") if part]
    return tuple(node for first, _, last in spans for node in range(int(first), int(last or first) + 1))


def interleave(address: int, size: int, nodes: Sequence[int]) -> bool:
    """Let whole pages that are not written yet come from these NUMA nodes in turn. False where that cannot be.

    mbind(2) without libnuma; the memory policy of the process, and what it may use (cpuset), still count.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not nodes:
        return False
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    call = _library().syscall
    return bool(call(number, address, size, _INTERLEAVE, mask, ctypes.c_ulong(64 * words + 1), 0) == 0)


@cache
def _copy() -> Any | None:
    try:
        copy = library.load().ferrule_copy_to_new
    except library.KernelsUnavailableError:
        return None
    copy.argtypes, copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
    return copy


def copy_to_new(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy like `to.copy_(source)`, but faster if the memory of `to` is allocated and not yet written."""
    plain = to.dtype == source.dtype and to.shape == source.shape and not (source.is_neg() or source.is_conj())
    both = to.is_cpu and source.is_cpu and to.is_contiguous() and source.is_contiguous()
    copy = _copy() if plain and both and to.nbytes >= _LARGE else None
    if copy is None:
        to.copy_(source)
    else:
        copy(to.data_ptr(), source.data_ptr(), to.nbytes)
