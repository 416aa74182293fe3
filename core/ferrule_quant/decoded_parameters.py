"""Parameters whose tensors are decoded as they come: layouts that are not cut where projections meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule_nn import CheckpointParameter, checkpoint_parameter

Decode = Callable[[torch.Tensor, torch.Size], torch.Tensor]


class DecodedParameter(CheckpointParameter):
    """A parameter whose tensors `decode` turns from a checkpoint's layout into a given shape.

    `decode` raises RuntimeError or ValueError for a tensor that does not fit.
    """

    decode: Decode

    def __new__(cls, data: torch.Tensor, axis: int, offsets: Mapping[int, int], decode: Decode) -> DecodedParameter:
        made: DecodedParameter = super().__new__(cls, data, axis, offsets)  # type: ignore[assignment]
        made.decode = decode
        return made

    def with_data(self, data: torch.Tensor) -> DecodedParameter:
        return DecodedParameter(data, self.axis, self.offsets, self.decode)

    def accepts(self, dtype: torch.dtype) -> bool:
        """Return True: `decode` checks the type."""
        return True

    def expanded(self, tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        if tensor.shape == view.shape and tensor.dtype == view.dtype:  # decoded already, as random weights are
            return tensor
        try:
            if not tensor.ndim:
                raise ValueError("a single number")
            return self.decode(tensor, view.shape)
        except (RuntimeError, ValueError) as error:
            shapes = f"{tensor.dtype} {list(tensor.shape)} does not hold {list(view.shape)}"
            raise CheckpointError(f"A tensor of a quantized layer is of another form: {shapes}.") from error


def decoded_parameter(
    layer: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    decode: Decode,
    count: Callable[[int], int] = int,
) -> DecodedParameter:
    """Make a parameter like `checkpoint_parameter`, whose tensors are decoded as they are loaded.

    Raises CheckpointError for a layer whose projections a checkpoint may interleave.
    """
    if getattr(layer, "groups", 1) > 1:
        raise CheckpointError("Quantized projections that a checkpoint interleaves in one tensor cannot be told apart.")
    plain = checkpoint_parameter(layer, shape, dtype, count=count)
    return DecodedParameter(plain.data, plain.axis, plain.offsets, decode)
