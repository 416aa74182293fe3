"""The kernels of a device: what computes there in the place of torch, which is the definition of every operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

Part = TypeVar("Part")


@dataclass(frozen=True)
class Kernels:
    """The parts that a platform supplies, each an instance of the class that some package asks for.

    `ferrule_nn.LayerKernels` are those of a model's layers, `ferrule_quant.Products` those of quantized weights, and
    `ferrule.interfaces.sampler.SamplerKernels` those that choose tokens. Whoever finds no part computes with torch.
    """

    parts: tuple[object, ...] = ()

    def part(self, kind: type[Part]) -> Part | None:
        """Return the part of that class, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)
