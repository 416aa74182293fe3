"""Experts in mxfp4, as gpt-oss has them: 32 numbers of 4 bits share a power of two (OCP Microscaling formats 1.0).

On CPUs they are kept as 8 bits with the same scales, which loses nothing, and activations have 15 bits; on other
devices they are floats of the activations' type. The layers besides experts are floats in such a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrule.interfaces.platform import DeviceCaps
from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule_nn import Dense, checkpoint_parameter
from ferrule_plugins.quantization.products import Integers, Quantized, Shared, cannot_run

GROUP = 32
# What the 16 codes of e2m1 stand for, doubled: a sign, two bits of exponent, one of fraction.
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_BIAS = 127  # of the exponents


class Mxfp4(QuantizationMethod):
    conformance = "ferrule_plugins.quantization.samples:MXFP4"
    formats = ("mxfp4",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._shared = Shared()

    @classmethod
    def refuses(cls, config: Mapping[str, Any], caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        return (
            cannot_run(caps.platform, dtype) if config else "reads checkpoints in mxfp4, and the weights are not in it"
        )

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        return Mxfp4Scheme(self._shared) if ".experts." in layer.name else None


class Mxfp4Scheme(Quantized):
    """Parameters: `blocks` uint8 [n, groups, 16], of a pair the first in the low half; `scales` uint8 [n, groups]."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared, wide=True)

    def allocate(self, layer: Any) -> None:
        self.given = layer.weight.dtype
        groups = -(-layer.in_features // GROUP)
        blocks = checkpoint_parameter(layer, (-1, groups, GROUP // 2), torch.uint8)
        scales = checkpoint_parameter(layer, (-1, groups), torch.uint8)
        layer.weight, layer.blocks, layer.scales = None, blocks, scales

    def weights(self, layer: Any) -> Integers:
        blocks, scales = layer.blocks.detach(), layer.scales.detach()
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)[:, : layer.in_features]
        doubled = torch.tensor(_DOUBLED, dtype=torch.int8, device=blocks.device)
        powers = torch.exp2(scales.float() - (_BIAS + 1))
        return Integers(doubled[codes.int()], powers.masked_fill(scales == 255, torch.nan), None, 8, GROUP)

    def pack(self, layer: Any) -> None:
        if layer.blocks.device.type == "cpu":
            super().pack(layer)
            return
        made = self.weights(layer)
        spread = made.scales.repeat_interleave(GROUP, 1)[:, : layer.in_features]
        for name in ("blocks", "scales"):
            setattr(layer, name, torch.nn.Parameter(getattr(layer, name).new_empty(0), requires_grad=False))
        layer.weight = torch.nn.Parameter((made.numbers * spread).to(self.given), requires_grad=False)
        layer.scheme, layer.quantized = Dense(), False  # a float layer from here on, whose experts can be stacked
        layer.scheme.pack(layer)
