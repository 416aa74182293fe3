"""The error of a layer's output by scheme, beside what the bits of its weights and activations imply."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ferrule.interfaces.plugins import Plugins
from tools.quality.rounding import ABOVE, BELOW, implied, relative
from tools.quality.schemes import Scheme

OUTPUTS, INPUTS, ROWS = 128, 512, 64
OUTLIERS = 20.0  # times the others, one of 64 inputs


class Measured(NamedTuple):
    bits: float  # of memory for a weight, on this CPU
    bound: float
    error: float

    @property
    def holds(self) -> bool:
        """True if the error is not above the bound, and not so far below it that the weights cannot have so few
        bits.
        """
        return self.bound / ABOVE / BELOW < self.error < self.bound


def measure(scheme: Scheme, plugins: Plugins, outliers: bool = False) -> Measured:
    """Measure a scheme on normally distributed weights; with `outliers` those of some inputs are far larger."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(OUTPUTS, INPUTS, generator=draw) * 0.05
    if outliers:
        weight[:, ::64] *= OUTLIERS
    weight = scheme.usable(weight.bfloat16())
    x = torch.randn(ROWS, INPUTS, generator=draw).bfloat16()
    layer = scheme.layer(plugins, weight)
    bits = 8 * sum(tensor.nbytes for tensor in layer.packed_tensors()) / weight.numel()
    error = relative(layer(x), x.double() @ weight.double().t())
    return Measured(bits, ABOVE * implied(scheme.weights, scheme.activations, weight.float(), x.float()), error)
