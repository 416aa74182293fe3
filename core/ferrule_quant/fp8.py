"""Weights of 8 bits in floating point (e4m3): the common part of their formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrule_nn import checkpoint_parameter
from ferrule_quant.online import Online
from ferrule_quant.packed_words import outputs
from ferrule_quant.products import FP8_FORM, Fp8, Quantized, Rounded, Shared, products_of
from ferrule_quant.scales import scale_parameter

BLOCK = 128
BLOCKS = BLOCK, BLOCK  # the usual ones
MX = 1, 32  # outputs and inputs that share a power of two in mxfp8
_LARGEST = 1 << 20


def block_of(config: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Return the outputs and inputs of a block, or None. Raises ValueError unless both are positive integers."""
    block = config.get(key)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2:
        raise ValueError(f"reads blocks of outputs and inputs, and {key} is {block!r:.80}")
    if not all(type(size) is int and 0 < size <= _LARGEST for size in block):
        raise ValueError(f"reads blocks of outputs and inputs, and {key} is {block!r:.80}")
    return block[0], block[1]


class Fp8FromFloats(Online):
    """A scheme for float weights that are quantized once loaded.

    On a GPU they become e4m3, with a scale for each output channel.
    """

    def weights(self, layer: Any) -> Rounded | Fp8:
        return self.e4m3(layer) if products_of(layer).keeps_fp8 else super().weights(layer)

    def e4m3(self, layer: Any) -> Fp8:
        from ferrule_kernels.cuda import fp8

        return Fp8(*fp8.quantize_weight(layer.weight.detach()))


class Fp8Scheme(Quantized):
    """A scheme for fp8 weights of a checkpoint. `numbers` and `scales` are the checkpoint's names of their tensors.

    There is a scale for each `block` of so many outputs and inputs, for each output, or for the matrix.
    """

    def __init__(
        self,
        shared: Shared,
        dtype: torch.dtype | None,
        *,
        wide: bool = False,
        numbers: str = "weight",
        scales: str = "weight_scale",
        block: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(shared, dtype, wide)
        self._numbers, self._scales = numbers, scales
        self._tall, self._step = block or (0, 0)

    def units(self, layer: Any) -> tuple[int, int]:
        return self._tall or 1, self._step or 1

    def allocate(self, layer: Any) -> None:
        self.given, self.form = layer.weight.dtype, FP8_FORM
        n, k = -1, layer.in_features
        weight = checkpoint_parameter(layer, (n, k), torch.float8_e4m3fn)
        if self._tall:
            scales: Any = scale_parameter(layer, -(-k // self._step), lambda rows: -(-rows // self._tall))
        else:
            scales = checkpoint_parameter(layer, (n, 1), torch.float32, broadcast=True)
        layer.ignored_tensors = (*layer.ignored_tensors, "input_scale", "input_scale_ub")
        layer.weight = None
        setattr(layer, self._numbers, weight)
        setattr(layer, self._scales, scales)

    def weights(self, layer: Any) -> Fp8:
        numbers, scales = (getattr(layer, name).detach() for name in (self._numbers, self._scales))
        if not self._tall:
            return Fp8(numbers, scales[:, 0])
        counts = outputs(layer)
        if any(rows % self._tall for rows in counts[:-1]):  # each projection begins a block: a scale for each row
            split = zip(scales.split([-(-rows // self._tall) for rows in counts]), counts, strict=True)
            repeated = [each.repeat_interleave(self._tall, 0)[:rows] for each, rows in split]
            return Fp8(numbers, torch.cat(repeated), 1, self._step)
        return Fp8(numbers, scales, self._tall, self._step)
