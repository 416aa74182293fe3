"""The division of rows into tiles, for all kernels whose time is that of reading and writing memory."""

from __future__ import annotations

_ELEMENTS = 8  # of a thread: 16 bytes of a 16-bit type, the widest load there is
_WARP = 32
_SMALLEST = 1024  # elements of a tile that keep a program busy
_MOST_WARPS = 16


def power_of_2(size: int) -> int:
    """Return the least power of two that is not below `size`, which is at least 1."""
    return 1 << (size - 1).bit_length()


def warps(elements: int) -> int:
    """Return how many warps a tile of so many elements has: up to a limit, enough to give each thread one load."""
    return max(1, min(_MOST_WARPS, elements // (_WARP * _ELEMENTS)))


def row_tile(size: int) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a tile that holds whole rows of `size`; short rows share a program."""
    columns = power_of_2(size)
    rows = max(1, _SMALLEST // columns)
    return rows, columns, warps(rows * columns)
