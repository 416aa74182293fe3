"""Quantized weights on an NVIDIA GPU. They are buffers of the layer, so whatever moves a model moves them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ferrule_quant.products import (
    Fp8,
    Integers,
    Levelled,
    Product,
    Products,
    Quantized,
    Rounded,
    Weights,
    Wide,
    checked,
)
from ferrule_quant.weights import gathered, sorted_by_group

_FP8_UNITS = (8, 9)  # the first compute capability that has them
_BLOCK = 128  # inputs that have a scale in the kernels for blocks
_WHY_BLOCKS = (
    f"no GPU kernel multiplies fp8 whose scales are not for {_BLOCK} inputs: such weights take 16 bits, or 32 with"
    " --dtype float32"
)


class CudaProducts(Products):
    """Products by kernels in Triton, of integers of 4 and 8 bits and fp8; other weights become floats."""

    keeps_fp8 = True
    looks_up = False
    any_type = False

    def taken(self, weights: Weights) -> Weights:
        return weights.integers() if isinstance(weights, Levelled | Rounded) else weights

    def integers(self, scheme: Quantized, layer: Any, weights: Integers) -> Product:
        added = weights.added()
        floats = weights.zeros is not None and weights.zeros.is_floating_point() or weights.offsets is not None
        grouped = weights.scales.shape[1] > 1 or added is not None
        if weights.table or floats or weights.bits > 4 and (grouped or weights.bits < 8):
            what = "of a table" if weights.table else "with offsets" if floats else "in groups, or with zero points"
            form = f"{weights.bits} bits {what}"
            why = f"no GPU kernel multiplies integers of {form}: such weights take 16 bits, or 32 with --dtype float32"
            return self.widened(scheme, layer, Wide(weights.widened(scheme.given), why))
        if weights.bits == 8:
            return self._int8(scheme, layer, weights)
        return self._int4(scheme, layer, weights, added)

    def fp8(self, scheme: Quantized, layer: Any, weights: Fp8) -> Product:
        checked(weights.numbers)
        if weights.tall and weights.step != _BLOCK:
            return self.widened(scheme, layer, Wide(weights.widened(scheme.given), _WHY_BLOCKS))
        from ferrule_kernels.cuda import fp8

        _keep(layer, numbers=weights.numbers.contiguous(), scales=weights.scales.contiguous())
        units = torch.cuda.get_device_capability(weights.numbers.device) >= _FP8_UNITS
        if not units and not scheme.wide:
            scheme.shared.say(
                "this GPU has no units for fp8: weights stay fp8, and are multiplied in the activations' type"
            )
        dtype = scheme.dtype
        multiply = partial(fp8.multiply if units and not scheme.wide else fp8.multiply_wide, tall=weights.tall)
        return lambda layer, x: multiply(x, layer.packed_numbers, layer.packed_scales, layer.bias, dtype)

    def _int8(self, scheme: Quantized, layer: Any, weights: Integers) -> Product:
        from ferrule_kernels.cuda import int8

        _keep(layer, numbers=weights.numbers.contiguous(), scales=weights.scales[:, 0].contiguous())
        multiply, dtype = int8.multiply_wide if scheme.wide else int8.multiply, scheme.dtype
        return lambda layer, x: multiply(x, layer.packed_numbers, layer.packed_scales, layer.bias, dtype)

    def _int4(self, scheme: Quantized, layer: Any, weights: Integers, added: torch.Tensor | None) -> Product:
        from ferrule_kernels.cuda import int4

        weights, order = sorted_by_group(weights, multiple=int4.QUARTER)
        shift = 8 - weights.middle  # fewer bits are numbers of four around the same middle
        zeros = None if weights.zeros is None or added is None else weights.zeros.to(torch.int32) + shift
        group = weights.group or weights.numbers.shape[1]
        packed = int4.pack(weights.numbers + shift, weights.scales.to(scheme.given), zeros, group)
        _keep(layer, words=packed.words, scales=packed.scales, zeros=packed.zeros, order=order)
        packed_weight = partial(int4.Packed, group=packed.group, inputs=packed.inputs)
        padded, dtype = order is not None and bool((order == layer.in_features).any()), scheme.dtype

        def product(layer: Any, x: torch.Tensor) -> torch.Tensor:
            if layer.packed_order is not None:
                x = gathered(x, layer.packed_order, padded)
            words, scales, zeros = layer.packed_words, layer.packed_scales, layer.packed_zeros
            return int4.multiply(x, packed_weight(words=words, scales=scales, zeros=zeros), layer.bias, dtype)

        return product


def _keep(layer: Any, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        layer.register_buffer(f"packed_{name}", tensor, persistent=False)
