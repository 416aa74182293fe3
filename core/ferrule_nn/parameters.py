"""Parameters without values: of the model's type, or as a quantized checkpoint has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ferrule_nn import ops
from ferrule_nn.division import DividedParameter, Division, current_shard


def parameter(*shape: int, division: Division | None = None, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return an uninitialised parameter on the default device, of the default type if no other is given.

    `shape` is that of the whole parameter; with a `division` each rank allocates its part. Raises ConfigError.
    """
    shard, dtype = current_shard(), dtype or torch.get_default_dtype()
    if division is not None and division.sections:
        own = sum(division.shares(shard.size))
        shape = (*shape[: division.axis], own, *shape[division.axis + 1 :])
    allocate = None if torch.empty(0).is_meta else ops.for_layers().allocate
    values = torch.empty(shape, dtype=dtype) if allocate is None else allocate(shape, dtype)
    return nn.Parameter(values, False) if division is None else DividedParameter(values, division, shard)


class CheckpointParameter(nn.Parameter):
    """A parameter with the shape and type that a quantized checkpoint has: packed in words, transposed, or one scale.

    The checkpoint may have one tensor for each projection that the layer merges. `axis` is the dimension of outputs;
    `offsets` maps the first output of each projection, and the number of all outputs, to the index in that dimension.
    With `broadcast` a projection's tensor may be smaller and is repeated, such as one scale for a whole matrix; one
    number for each output may come without the dimension of size 1. `optional` are factors that are 1 where a
    checkpoint has none.
    """

    axis: int
    offsets: Mapping[int, int]
    broadcast: bool
    optional: bool

    def __new__(
        cls,
        data: torch.Tensor,
        axis: int,
        offsets: Mapping[int, int],
        broadcast: bool = False,
        optional: bool = False,
    ) -> CheckpointParameter:
        made: CheckpointParameter = super().__new__(cls, data, False)
        made.axis, made.offsets, made.broadcast, made.optional = axis, offsets, broadcast, optional
        return made

    def with_data(self, data: torch.Tensor) -> CheckpointParameter:
        """Return the same parameter with other memory."""
        return CheckpointParameter(data, self.axis, self.offsets, self.broadcast, self.optional)

    def outputs(self, start: int, stop: int) -> torch.Tensor:
        """Return a view of outputs [start, stop), which begin and end a projection, or of all if `stop` is 0."""
        if not stop:
            return self.data
        first = self.offsets[start]
        return self.data.narrow(self.axis, first, self.offsets[stop] - first)

    def accepts(self, dtype: torch.dtype) -> bool:
        """Return whether numbers of that type keep their meaning here: the same type, or another float for a float."""
        both = dtype.is_floating_point and self.dtype.is_floating_point
        return dtype == self.dtype or both and min(dtype.itemsize, self.dtype.itemsize) > 1

    def expanded(self, tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """Return `tensor` repeated to the shape of `view` where `broadcast` allows it; else as it is."""
        if not self.broadcast:
            return tensor
        if view.shape == (*tensor.shape, 1):
            return tensor.unsqueeze(-1)
        try:
            return tensor.expand(view.shape)
        except RuntimeError:  # the shapes do not fit: the loader raises the error, with both
            return tensor


def checkpoint_parameter(
    layer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    count: Callable[[int], int] = int,
    broadcast: bool = False,
) -> CheckpointParameter:
    """Make an uninitialised `CheckpointParameter` for `layer`, on the device of its weight.

    The dimension of outputs is -1 in `shape`; `count` gives the number of entries there for a projection with so many
    outputs, by default one for each.
    """
    offsets, index, border = {0: 0}, 0, 0
    for outputs in layer.projections.values() or (layer.out_features,):
        border, index = border + outputs, index + count(outputs)
        offsets[border] = index
    axis = list(shape).index(-1)
    sizes = [index if size == -1 else size for size in shape]
    return CheckpointParameter(torch.empty(sizes, dtype=dtype, device=layer.weight.device), axis, offsets, broadcast)
