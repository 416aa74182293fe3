"""Weights of 8 bits, made from a float checkpoint as it loads. A method that reads quantized weights names its
`formats`, and its schemes replace the layer's parameters in `allocate` by those that the checkpoint holds."""

from __future__ import annotations

from typing import Any

import torch

from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_quant import CheckedMethod, Integers, Quantized, chosen


class ExampleQuantization(CheckedMethod):
    left_keys = ("modules_to_not_convert",)
    from_floats = True

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        return None if layer.head or chosen(layer, self.left) else ExampleScheme(self.shared)


class ExampleScheme(Quantized):
    """A scheme that defines the weights; `Quantized` lays them out for the device's kernels, and multiplies."""

    def weights(self, layer: Any) -> Integers:
        self.given = layer.weight.dtype
        weight = layer.weight.detach().float()
        scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127  # [out, 1]
        return Integers((weight / scales).round().to(torch.int8), scales, None, bits=8)
