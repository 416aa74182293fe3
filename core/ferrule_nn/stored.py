"""Parameters as quantized checkpoints have them: outputs in any dimension, packed in words, or sharing a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


class Stored(nn.Parameter):
    """A parameter of a layer, some of whose projections a checkpoint may hold apart.

    `axis` is its dimension of outputs. `places` maps each border between the layer's projections, and both ends, to its
    index in that dimension. With `spread` a tensor stands for all of its part, such as the one scale of a matrix.
    """

    axis: int
    places: Mapping[int, int]
    spread: bool

    def __new__(cls, data: torch.Tensor, axis: int, places: Mapping[int, int], spread: bool = False) -> Stored:
        made: Stored = super().__new__(cls, data, False)
        made.axis, made.places, made.spread = axis, places, spread
        return made

    def over(self, data: torch.Tensor) -> Stored:
        """The same with other memory."""
        return Stored(data, self.axis, self.places, self.spread)

    def cut(self, start: int, stop: int) -> torch.Tensor:
        """The part of the layer's outputs [start, stop), between two borders; all of it where `stop` is 0."""
        if not stop:
            return self.data
        first = self.places[start]
        return self.data.narrow(self.axis, first, self.places[stop] - first)

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether numbers of that type keep their meaning here: the same type, or another float for a float."""
        both = dtype.is_floating_point and self.dtype.is_floating_point
        return dtype == self.dtype or both and min(dtype.itemsize, self.dtype.itemsize) > 1

    def fit(self, tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """`tensor` in the shape of `part` where it may be repeated; else as it is."""
        if not self.spread:
            return tensor
        try:
            return tensor.expand(part.shape)
        except RuntimeError:  # it does not repeat to that shape, which the loader says with both
            return tensor


def stored(
    layer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    count: Callable[[int], int] = int,
    spread: bool = False,
) -> Stored:
    """An uninitialised parameter for `layer`, on the device of its weight.

    The dimension of outputs is -1 in `shape`; `count` gives how many entries it has for a projection of so many
    outputs, by default one for each.
    """
    places, index, border = {0: 0}, 0, 0
    for outputs in dict(getattr(layer, "parts", {})).values() or (layer.out_features,):
        border, index = border + outputs, index + count(outputs)
        places[border] = index
    axis = list(shape).index(-1)
    sizes = [index if size == -1 else size for size in shape]
    return Stored(torch.empty(sizes, dtype=dtype, device=layer.weight.device), axis, places, spread)
