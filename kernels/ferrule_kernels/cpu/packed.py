"""Packed matrices in files: the order of their bytes."""

from __future__ import annotations

from ferrule_kernels.cpu import dense

# Of the bytes of `DenseMatrix.packed` and `PackedMatrix.packed`, by their number in files: that of processors without
# tile registers, and with them. Both are read everywhere. An order that changes takes a new number.
LAYOUTS = (1, 2)


def layout() -> int:
    """Return the layout that weights are packed in on this processor."""
    return LAYOUTS[dense.unit() == "amx"]
