"""Weights of 8 bits in floating point (e4m3), as checkpoints have them, or made from float ones.

Formats: blocks with a scale each (`weight_block_size`, 128 x 128 in DeepSeek-V3 and what follows it,
https://arxiv.org/abs/2412.19437; with ``scale_fmt`` ue8m0 the scales are powers of two, and may be kept as e8m0), one
scale for each matrix, and one for each output channel (``fbgemm_fp8``).
Activations are quantized as they come, with a scale for each row, or for each 128 inputs of a row beside blocks; scales
of activations that a checkpoint measured (`input_scale`) are coarser, and not used. CPUs keep the weights as integers
of 8 bits with a scale for each 32 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_nn import checkpoint_parameter
from ferrule_plugins.quantization.integers import Online
from ferrule_quant.method import CheckedMethod
from ferrule_quant.names import chosen
from ferrule_quant.products import FP8_FORM, Fp8, Quantized, Rounded, Shared, products_of
from ferrule_quant.scales import scale_parameter
from ferrule_quant.words import outputs

BLOCK = 128
BLOCKS = BLOCK, BLOCK  # the usual ones
MX = 1, 32  # outputs and inputs that share a power of two in mxfp8
_LARGEST = 1 << 20


def block_of(config: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """The outputs and inputs of a block. Raises ValueError for what is not two positive numbers."""
    block = config.get(key)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2:
        raise ValueError(f"reads blocks of outputs and inputs, and {key} is {block!r:.80}")
    if not all(type(size) is int and 0 < size <= _LARGEST for size in block):
        raise ValueError(f"reads blocks of outputs and inputs, and {key} is {block!r:.80}")
    return block[0], block[1]


class Fp8Method(CheckedMethod):
    formats = ("fp8", "fbgemm_fp8", "ptpc_fp8", "deepseek_v4_fp8")
    left_keys = ("modules_to_not_convert", "ignored_layers")
    from_floats = True

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        block_of(config, "weight_block_size")
        if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise ValueError(f"reads e4m3, and fmt is {config['fmt']!r}")

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        dtype = torch.float32 if layer.head else None
        if layer.head and not self.config.get("lm_head"):
            return None  # heads stay as they are in these formats
        if not self.config:
            return Fp8FromFloats(FP8_FORM, self.shared, dtype)
        if chosen(layer, self.left):
            return None
        if self.config.get("weight_block_size"):
            return Fp8Scheme(
                self.shared, dtype, scales="weight_scale_inv", block=block_of(self.config, "weight_block_size")
            )
        return Fp8Scheme(self.shared, dtype)


class Fp8FromFloats(Online):
    """Float weights, quantized when they have come: on a GPU to e4m3, with a scale for each output channel."""

    def weights(self, layer: Any) -> Rounded | Fp8:
        return self.e4m3(layer) if products_of(layer).keeps_fp8 else super().weights(layer)

    def e4m3(self, layer: Any) -> Fp8:
        from ferrule_kernels.cuda import fp8

        return Fp8(*fp8.quantize_weight(layer.weight.detach()))


class Fp8Scheme(Quantized):
    """fp8 weights of a checkpoint. `numbers` and `scales` are what it calls these.

    Scales are of `block`, so many outputs and inputs, of each output, or of the matrix.
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
