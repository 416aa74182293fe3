"""Quantized weights on a CPU that has compiled kernels."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from ferrule_kernels import matmul as reference
from ferrule_kernels.cpu.matmul import PANEL, PackedMatrix, Workspace
from ferrule_kernels.cpu.pages import memory_nodes
from ferrule_kernels.cpu.tables import MergedTables
from ferrule_kernels.matmul import Form
from ferrule_quant.products import (
    FP8_MOST,
    Fp8,
    Levelled,
    Product,
    Products,
    Quantized,
    Rounded,
    Tables,
    Weights,
    check_scales,
    fitting,
    fp8_form,
)


class CpuProducts(Products):
    """Products by the CPU's compiled kernels. The layers of a model share working memory."""

    compiled = True

    def __init__(self) -> None:
        super().__init__()
        self.workspace = Workspace()

    def taken(self, weights: Weights) -> Weights:
        return weights

    def coming_rows(self, scheme: Quantized, layer: Any, form: Form) -> PackedMatrix | None:
        """Return the matrix that takes a layer's rows as they are loaded, or None if it must be packed as a whole.

        That is so where projections do not begin with a panel, for parameters without memory, and where memory has
        several nodes: there the kernel divides the whole matrix among threads as products do.
        """
        borders = list(accumulate(layer.projections.values()))[:-1]
        if next(layer.parameters()).is_meta or any(border % PANEL for border in borders) or len(memory_nodes()) > 1:
            return None
        if scheme.coming is None:
            scheme.coming = self.empty(layer, form)
        return scheme.coming  # type: ignore[no-any-return]

    def empty(self, layer: Any, form: Form) -> PackedMatrix:
        """Make the matrix of a layer, without rows."""
        return PackedMatrix.empty(layer.out_features, layer.in_features, form, self.workspace)

    def filled(self, scheme: Quantized, layer: Any, matrix: PackedMatrix) -> Product:
        matrix.add_bias(layer.bias)
        return self._multiplied(scheme, matrix)

    def rounded(self, scheme: Quantized, layer: Any, weights: Rounded) -> Product:
        with fitting():
            matrix = PackedMatrix(weights.weight, weights.form, layer.bias, self.workspace)
        return self._multiplied(scheme, matrix)

    def fp8(self, scheme: Quantized, layer: Any, weights: Fp8) -> Product:
        check_scales(weights.scales * FP8_MOST)
        form, dtype = fp8_form(scheme)
        matrix = self.empty(layer, form)
        with fitting():
            matrix.put_fp8(weights.numbers, weights.scales, weights.block, dtype)
        return self.filled(scheme, layer, matrix)

    def levelled(self, scheme: Quantized, layer: Any, weights: Levelled) -> Product:
        form, scales, offsets = weights.form, weights.scales, weights.offsets
        matrix = PackedMatrix(weights.numbers, form, layer.bias, self.workspace, scales, offsets)
        return self._multiplied(scheme, matrix)

    def tables(self, scheme: Quantized, layer: Any, weights: Tables) -> Product:
        matrix = MergedTables(weights.projections, scheme.given, layer.bias)
        scheme.unpacked = matrix.tensors()
        return lambda _, x: matrix.multiply(x, scheme.dtype)

    def quantized(self, scheme: Quantized, layer: Any, form: Form, given: reference.Quantized) -> Product:
        matrix = PackedMatrix(given.numbers, form, layer.bias, self.workspace, given.scales, given.offsets)
        return self._multiplied(scheme, matrix)

    def _multiplied(self, scheme: Quantized, matrix: PackedMatrix) -> Product:
        scheme.matrix, dtype = matrix, scheme.dtype
        return lambda _, x: matrix.multiply(x, dtype)
