"""Floats of 4 bits, e2m1, as checkpoints have them: nvfp4 and mxfp4."""

from __future__ import annotations

from typing import Any

import torch

from ferrule_nn import checkpoint_parameter
from ferrule_quant.code_tables import E2M1, Coded, CodedScheme, halves, powers_of_two
from ferrule_quant.integers import UNUSED
from ferrule_quant.products import Shared, checked
from ferrule_quant.scales import check_groups


class Float4Scheme(CodedScheme):
    """A scheme with parameters `numbers` uint8, `weight_scale` and `weight_global_scale`.

    The first number of a pair is in the low half.
    """

    def __init__(self, shared: Shared, dtype: torch.dtype | None, kind: str, numbers: str = "weight_packed") -> None:
        super().__init__(shared, dtype)
        self.kind, self._numbers = kind, numbers
        self.group = 16 if kind == "nvfp4" else 32

    def units(self, layer: Any) -> tuple[int, int]:
        return 1, self.group

    def allocate(self, layer: Any) -> None:
        self.given, k = layer.weight.dtype, layer.in_features
        check_groups(k, self.group)
        kept = torch.float8_e4m3fn if self.kind == "nvfp4" else torch.uint8
        packed = checkpoint_parameter(layer, (-1, k // 2), torch.uint8)
        scale = checkpoint_parameter(layer, (-1, k // self.group), kept)
        layer.ignored_tensors = (*layer.ignored_tensors, "input_global_scale", *UNUSED)
        if self.kind == "nvfp4":
            layer.weight_global_scale = checkpoint_parameter(layer, (-1, 1), torch.float32, broadcast=True)
        layer.weight, layer.weight_scale = None, scale
        setattr(layer, self._numbers, packed)

    def read_codes(self, layer: Any) -> Coded:
        scales = layer.weight_scale.detach()
        if self.kind == "nvfp4":
            scales = checked(scales).float() / layer.weight_global_scale.detach()
        else:
            scales = powers_of_two(scales)
        return Coded(halves(getattr(layer, self._numbers).detach()), E2M1, scales, self.group)
