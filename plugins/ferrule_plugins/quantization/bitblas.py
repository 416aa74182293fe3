"""Checkpoints in the form of BitBLAS (https://github.com/microsoft/BitBLAS, bitblas/quantization/utils.py).

Numbers of 2, 4 or 8 bits are packed into bytes along the inputs, `qweight` int8 [n, k * bits / 8]
(``general_compress``). Those of 2 and 4 bits, written for activations in float16, are then permuted within words of
32 bits (``interleave_weight``), so that a kernel makes halves of them by a few instructions; those for bfloat16 are
not. The type of `scales` [n, groups] says which. Zero points are packed along the outputs, [groups, n * bits / 8], in
`qzeros` (https://github.com/ModelCloud/GPTQModel, gptqmodel/nn_modules/qlinear/bitblas.py) or in `zeros` (vLLM,
bitblas.py).
Symmetric weights have numbers around the middle, and zero points that say so, or none.

Weights whose tiles are permuted too (``propagate_b``) have four dimensions. These programs do not write such files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule_files.safetensors import read_header
from ferrule_files.shards import weight_files
from ferrule_nn import checkpoint_parameter
from ferrule_quant.decoded_parameters import decoded_parameter
from ferrule_quant.packed_words import AWQ_ORDER, check_words, in_order, outputs, per_words, unpacked
from ferrule_quant.products import Integers, Quantized, Shared, has_room, kept

BITS = (2, 4, 8)
ZEROS = "bitblas_zeros"  # of a configuration: what zero points are called
_NAMES = ("qzeros", "zeros")
_INTERLEAVED = {4: AWQ_ORDER, 2: (0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)}


def stated(folder: Path) -> dict[str, Any]:
    """Return the kind of zero points that the folder's files have, as a configuration. Raises CheckpointError."""
    for file in weight_files(folder, ".safetensors", "model.safetensors"):
        if any(name.endswith(".zeros") for name in read_header(file)):
            return {ZEROS: "zeros"}
    return {}


def check(bits: int, symmetric: bool, ordered: bool) -> None:
    """Check settings. Raises ValueError with what is not supported."""
    if ordered:
        raise ValueError("does not read desc_act=true in the form of BitBLAS, which has no order")
    if symmetric and bits == 8:
        raise ValueError("does not read symmetric weights of 8 bits in the form of BitBLAS: programs disagree on them")


class BitblasScheme(Quantized):
    """A scheme with parameters `qweight`, `scales` and, where weights are not symmetric, zero points named `zeros`."""

    def __init__(
        self, shared: Shared, dtype: torch.dtype | None, *, bits: int, group: int, symmetric: bool, zeros: str
    ) -> None:
        super().__init__(shared, dtype, wide=True)
        self.bits, self.group, self.symmetric = bits, group, symmetric
        self.zeros = zeros if zeros in _NAMES else _NAMES[0]
        self.form = kept(bits, group, True, not symmetric and not has_room(bits, group))
        self._types: set[torch.dtype] = set()  # of the scales that came

    def allocate(self, layer: Any) -> None:
        k, per = layer.in_features, 8 // self.bits
        check_words((k, *outputs(layer)), per_words(self.bits)[0])
        check_words((k,), self.group or k)
        self.given, groups = layer.weight.dtype, k // (self.group or k)
        made: dict[str, torch.nn.Parameter] = {
            "qweight": checkpoint_parameter(layer, (-1, k // per), torch.int8),
            "scales": decoded_parameter(layer, (-1, groups), torch.float32, self._scales),
        }
        if not self.symmetric:
            made[self.zeros] = checkpoint_parameter(layer, (groups, -1), torch.int8, count=lambda n: n // per)
        unused = (*_NAMES, "g_idx", *(() if layer.bias is not None else ("bias",)))
        layer.ignored_tensors = (*layer.ignored_tensors, *(name for name in unused if name not in made))
        layer.weight = None
        for name, parameter in made.items():
            setattr(layer, name, parameter)

    def _scales(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if not tensor.is_floating_point():
            raise ValueError("scales are floats")
        self._types.add(tensor.dtype)
        return tensor.float().reshape(shape)

    def weights(self, layer: Any) -> Integers:
        if len(self._types) > 1:
            raise CheckpointError("Scales of one layer in the form of BitBLAS are of several types.")
        scales = layer.scales.detach()
        numbers = unpacked(layer.qweight.detach().view(torch.int32), self.bits)
        if self.bits in _INTERLEAVED and self._types != {torch.bfloat16}:
            numbers = in_order(numbers, _INTERLEAVED[self.bits])
        if self.symmetric:
            return Integers(numbers, scales, None, self.bits, self.group)
        zeros = unpacked(getattr(layer, self.zeros).detach().view(torch.int32), self.bits).t().to(torch.int16)
        if self.bits == 8:
            numbers, zeros = (numbers.to(torch.int16) - 128).to(torch.int8), zeros - 128
        return Integers(numbers, scales, zeros.contiguous(), self.bits, self.group)
