"""torchao's tensors of 4 bits: `Int4Tensor`, `Int4TilePackedTo4dTensor` and `Int4PlainInt32Tensor`.

The first are bytes of two signed numbers, `qdata` [n, k / 2], with `scale` and `zero_point`, floats that are added,
[groups, n].

``tile_packed_to_4d`` is what matrix units of NVIDIA's GPUs read, `qdata` int32 [n / 8, k / 128, 32, 4], filled up to 8
outputs and 1024 inputs: a word has eight inputs of one output, of 32 that follow each other, first the even ones
(https://github.com/pytorch/pytorch, aten/src/ATen/native/cuda/int4mm.cu). `scale_and_zero` is [groups, n, 2], and a
weight (number - 8) * scale + zero. AMD's GPUs have another order in tensors of the same shape, which nothing tells.

``plain_int32`` is that of Intel's GPUs: words of eight numbers in order, `qdata` [n, k / 8], with integers as zero
points. Huawei's have floats there, and are not read. ``preshuffled`` cannot be written in safetensors files.
https://github.com/pytorch/ao, torchao/quantization/quantize_/workflows/int4.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule_nn import checkpoint_parameter
from ferrule_quant.code_tables import halves
from ferrule_quant.packed_words import outputs, unpacked
from ferrule_quant.products import Integers, Quantized, Shared, kept

NUMBERS, SCALES, ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_BOTH = "_weight_scale_and_zero"
_TALL, _LONG, _SPAN = 8, 1024, 128  # outputs and inputs that tiles are filled up to, and inputs of a row of tiles


class Int4Scheme(Quantized):
    """A scheme for numbers of 4 bits with scales for groups of inputs."""

    def __init__(self, shared: Shared, dtype: torch.dtype | None, group: int) -> None:
        super().__init__(shared, dtype, wide=True)
        self.group = group
        self.form = kept(4, group, True, True)

    def allocate(self, layer: Any) -> None:
        self.given, k = layer.weight.dtype, layer.in_features
        if k % 8 or self.group and k % self.group:
            raise CheckpointError(f"{k} inputs of a layer are not a whole number of groups of {self.group}.")
        made = self.parameters(layer)
        layer.weight = None
        for name, parameter in made.items():
            setattr(layer, name, parameter)

    def groups(self, layer: Any) -> int:
        """Return how many groups there are along the inputs."""
        inputs: int = layer.in_features
        return inputs // (self.group or inputs)

    @abstractmethod
    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that the checkpoint fills."""


class PairsScheme(Int4Scheme):
    """A scheme for bytes [n, k / 2] of two signed numbers, with scales and offsets [groups, n]."""

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        groups = self.groups(layer)
        return {
            NUMBERS: checkpoint_parameter(layer, (-1, layer.in_features // 2), torch.int8),
            SCALES: checkpoint_parameter(layer, (groups, -1), torch.float32),
            ZEROS: checkpoint_parameter(layer, (groups, -1), torch.float32),
        }

    def weights(self, layer: Any) -> Integers:
        numbers = halves(getattr(layer, NUMBERS).detach().view(torch.uint8)) ^ 8
        scales, added = (getattr(layer, name).detach().t().contiguous() for name in (SCALES, ZEROS))
        return Integers(numbers, scales, None, 4, self.group, offsets=added)


class WordsScheme(Int4Scheme):
    """A scheme for words [n, k / 8] of unsigned numbers, with scales and integer zero points [groups, n]."""

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        groups = self.groups(layer)
        return {
            NUMBERS: checkpoint_parameter(layer, (-1, layer.in_features // 8), torch.int32),
            SCALES: checkpoint_parameter(layer, (groups, -1), torch.float32),
            ZEROS: checkpoint_parameter(layer, (groups, -1), torch.int8),
        }

    def weights(self, layer: Any) -> Integers:
        numbers = unpacked(getattr(layer, NUMBERS).detach())
        scales, zeros = (getattr(layer, name).detach().t().contiguous() for name in (SCALES, ZEROS))
        return Integers(numbers, scales, zeros.to(torch.int16), 4, self.group)


class TilesScheme(Int4Scheme):
    """A scheme for tiles, with scales and offsets; each projection is filled up."""

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        inputs = -(-layer.in_features // _LONG) * _LONG
        if self.group and _LONG % self.group:
            raise CheckpointError(f"Groups of {self.group} inputs do not fill tiles of {_LONG}.")
        groups = inputs // (self.group or inputs)
        tiles = (-1, inputs // _SPAN, 4 * _TALL, 4)
        return {
            NUMBERS: checkpoint_parameter(layer, tiles, torch.int32, count=lambda n: _filled_up(n) // _TALL),
            _BOTH: checkpoint_parameter(layer, (groups, -1, 2), torch.float32, count=_filled_up),
        }

    def weights(self, layer: Any) -> Integers:
        rows, first = [], 0
        for count in outputs(layer):
            rows.append(torch.arange(first, first + count))
            first += _filled_up(count)
        chosen = torch.cat(rows).to(layer.device)
        numbers = _untiled(getattr(layer, NUMBERS).detach())[chosen, : layer.in_features].contiguous()
        both = getattr(layer, _BOTH).detach()[: self.groups(layer), chosen]
        scales, added = (each.t().contiguous() for each in both.unbind(-1))
        return Integers(numbers, scales, None, 4, self.group, offsets=added)


def _filled_up(count: int) -> int:
    return -(-count // _TALL) * _TALL


def _untiled(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [n / 8, k / 128, 32, 4] to uint8 [n, k]: 32 is 8 outputs and 4 inputs, 4 is spans of 32 inputs."""
    places = torch.stack([(words >> (4 * place) & 15).to(torch.uint8) for place in range(8)], dim=-1)
    # [tile, row of tiles, output, pair of inputs, span, even or odd, eight inputs]
    each = places.view(*words.shape[:2], _TALL, 4, 4, 2, 4)
    return each.permute(0, 2, 1, 4, 6, 3, 5).reshape(words.shape[0] * _TALL, words.shape[1] * _SPAN)
