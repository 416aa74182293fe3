"""What the system is told about pages of memory."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ferrule_kernels.cpu import library

_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call
_INTERLEAVE = 3
_LARGE = 1 << 20  # bytes; what is smaller may lie in pages that there are


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
    """The NUMA nodes that have memory; none where the system does not tell."""
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
    """As `to.copy_(source)`, and sooner if the memory of `to` was allocated and not written yet."""
    plain = to.dtype == source.dtype and to.shape == source.shape and not (source.is_neg() or source.is_conj())
    both = to.is_cpu and source.is_cpu and to.is_contiguous() and source.is_contiguous()
    copy = _copy() if plain and both and to.nbytes >= _LARGE else None
    if copy is None:
        to.copy_(source)
    else:
        copy(to.data_ptr(), source.data_ptr(), to.nbytes)
