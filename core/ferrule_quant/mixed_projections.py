"""Merged projections that a checkpoint quantizes in different ways, or of which it leaves some as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_kernels.cpu.bank import Abreast
from ferrule_kernels.cpu.matmul import PackedMatrix
from ferrule_nn import Dense, Linear, PacksForCpu, ops

T = TypeVar("T")


def side_by_side(
    layer: LinearLayer, settings: Sequence[T | None], make: Callable[[T], LinearScheme]
) -> LinearScheme | None:
    """Return the scheme of a layer whose projections, or which itself, have these settings; None stands for floats."""
    if all(each == settings[0] for each in settings):
        return None if settings[0] is None else make(settings[0])
    schemes = [None if each is None else make(each) for each in settings]
    return Apart(dict(zip(layer.projections, schemes, strict=True)))


class Apart(LinearScheme):
    """A scheme in which each projection of a merged layer is a layer of its own, with its scheme, or None for floats.

    The results are put side by side, so that the model gets what the merged layer would give.
    """

    def __init__(self, schemes: Mapping[str, LinearScheme | None]) -> None:
        self._schemes = schemes
        self._parts: tuple[Linear, ...] = ()
        self._abreast: Abreast | None = None  # where one kernel multiplies all of them

    def allocate(self, layer: Any) -> None:
        dtype, parts = layer.weight.dtype, []
        for name, scheme in self._schemes.items():
            with torch.device(layer.device), ops.using(layer.kernels):
                part = Linear(layer.in_features, layer.projections[name], layer.bias is not None).to(dtype)
            part.ignored_tensors = layer.ignored_tensors
            part.scheme, part.quantized = scheme or Dense(), scheme is not None
            part.scheme.allocate(part)
            layer.add_module(name, part)
            parts.append(part)
        layer.weight = layer.bias = None
        self._parts = tuple(parts)

    def pack(self, layer: Any) -> None:
        for part in self._parts:
            part.pack()
        matrices = [part.scheme.matrix if isinstance(part.scheme, PacksForCpu) else None for part in self._parts]
        quantized = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
        if len(quantized) == len(matrices):
            self._abreast = Abreast(quantized)

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        return ()  # the parts have them

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if self._abreast is not None:
            return self._abreast.multiply(x)
        return torch.cat([part(x) for part in self._parts], dim=-1)
