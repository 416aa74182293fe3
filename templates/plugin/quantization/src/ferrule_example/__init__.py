"""Weights of 8 bits, made from a float checkpoint as it loads. A method that reads quantized weights names its
`formats`, and its schemes replace the layer's parameters in `allocate` by those that the checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ferrule.interfaces.platform import DeviceCaps
from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod


class ExampleQuantization(QuantizationMethod):
    @classmethod
    def refuses(cls, config: Mapping[str, Any], caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        return None if dtype.is_floating_point else f"it computes in floats, not in {dtype}"

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        return None if layer.head else Rounded()


class Rounded(LinearScheme):
    def pack(self, layer: Any) -> None:
        weight = layer.weight.detach().float()
        self._scale = weight.abs().amax(dim=1) / 127  # [out]
        self._numbers = (weight / self._scale.clamp(min=1e-30)[:, None]).round().to(torch.int8)  # [out, in]
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)  # and its memory is free

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        return self._numbers, self._scale

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Row by row: the sums of many rows at once may be in another order, and then not the same."""
        weight = self._numbers.float()
        y = torch.stack([torch.mv(weight, row) for row in x.float()]) * self._scale
        return (y if layer.bias is None else y + layer.bias.float()).to(x.dtype)
