"""Integers of 8 bits as checkpoints have them: numbers with a scale for the matrix, each output or each group."""

from __future__ import annotations

from typing import Any

import torch

from ferrule_nn import checkpoint_parameter
from ferrule_quant.products import Integers, Quantized, Shared
from ferrule_quant.scales import check_groups

UNUSED = ("input_scale", "input_zero_point", "weight_shape")  # tensors beside weights that are not used


class Int8Scheme(Quantized):
    """A scheme with parameters `weight` int8 and `weight_scale`, one or [n, groups].

    There is also `weight_zero_point` where weights are not symmetric.
    """

    def __init__(
        self, shared: Shared, dtype: torch.dtype | None, wide: bool, size: int = 0, symmetric: bool = True
    ) -> None:
        super().__init__(shared, dtype, wide)
        self._size, self._symmetric = size, symmetric

    def units(self, layer: Any) -> tuple[int, int]:
        return 1, self._size or 1

    def allocate(self, layer: Any) -> None:
        self.given, groups = layer.weight.dtype, 1
        if self._size:
            check_groups(layer.in_features, self._size)
            groups = layer.in_features // self._size
        unused = ("weight_zero_point", "weight_g_idx") if self._symmetric else ("weight_g_idx",)
        layer.ignored_tensors = (*layer.ignored_tensors, *UNUSED, *unused)
        layer.weight_scale = checkpoint_parameter(layer, (-1, groups), torch.float32, broadcast=groups == 1)
        if not self._symmetric:
            layer.weight_zero_point = checkpoint_parameter(layer, (-1, groups), torch.int8, broadcast=groups == 1)
        layer.weight = checkpoint_parameter(layer, (-1, layer.in_features), torch.int8)

    def weights(self, layer: Any) -> Integers:
        zeros = None if self._symmetric else layer.weight_zero_point.detach()
        return Integers(layer.weight.detach(), layer.weight_scale.detach(), zeros, 8, self._size)
