"""What the system is told about pages of memory."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch


@cache
def _library() -> Any:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
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
