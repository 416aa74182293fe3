"""Scales of a checkpoint in the types and shapes that its writers choose, and scales of a layer's activations.

A power of two may be kept as its exponent alone: e8m0 of the OCP Microscaling formats 1.0, as such or as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearScheme
from ferrule_nn import CheckpointParameter, checkpoint_parameter
from ferrule_quant.code_tables import powers_of_two
from ferrule_quant.products import check_scales

_EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)
_ONE = "pre_quant_scale"


class ScaleParameter(CheckpointParameter):
    """Scales in float32. A checkpoint may have their exponents, and further dimensions of size 1."""

    def with_data(self, data: torch.Tensor) -> ScaleParameter:
        return ScaleParameter(data, self.axis, self.offsets, self.broadcast)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _EXPONENTS or super().accepts(dtype)

    def expanded(self, tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        if tensor.dtype in _EXPONENTS:
            tensor = powers_of_two(tensor.contiguous().view(torch.uint8))
        if tensor.dim() > view.dim() and _sizes(tensor.shape) == _sizes(view.shape):
            tensor = tensor.reshape(view.shape)
        return super().expanded(tensor, view)


def _sizes(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]


def scale_parameter(layer: Any, columns: int, count: Callable[[int], int] = int) -> ScaleParameter:
    """Make a parameter for `columns` scales of each output, or of each group of outputs that `count` counts."""
    plain = checkpoint_parameter(layer, (-1, columns), torch.float32, count=count)
    return ScaleParameter(plain.data, plain.axis, plain.offsets)


def check_groups(inputs: int, group: int) -> None:
    """Check that a layer's inputs are whole groups. Raises CheckpointError."""
    if inputs % group:
        raise CheckpointError(f"{inputs} inputs of a layer are not a whole number of groups of {group}.")


class Smoothed(LinearScheme):
    """A scheme whose activations are multiplied by `pre_quant_scale`, one number for each input, where there is one.

    Such numbers make activations easier to quantize (https://arxiv.org/abs/2211.10438) or weigh what weights matter
    (https://arxiv.org/abs/2306.00978); mostly a norm before the layer has them, and the checkpoint none.
    """

    def __init__(self, inner: LinearScheme) -> None:
        self._inner = inner

    def allocate(self, layer: Any) -> None:
        plain = checkpoint_parameter(layer, (-1, layer.in_features), torch.float32, count=lambda _: 1, broadcast=True)
        self._inner.allocate(layer)
        made = CheckpointParameter(plain.data, plain.axis, plain.offsets, broadcast=True, optional=True)
        setattr(layer, _ONE, made)

    def pack(self, layer: Any) -> None:
        scales = getattr(layer, _ONE).detach()
        check_scales(scales)
        if not torch.equal(scales, scales[:1].expand_as(scales)):
            raise CheckpointError(f"Projections that are one matrix here have different tensors {_ONE!r}.")
        delattr(layer, _ONE)
        self._inner.pack(layer)
        if bool((scales == 1).all()):
            layer.scheme = self._inner
        else:
            layer.register_buffer("packed_input_scales", scales[0].clone(), persistent=False)

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        return self._inner.packed_tensors()

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return self._inner.matmul(layer, (x * layer.packed_input_scales).to(x.dtype))
