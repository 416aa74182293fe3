"""Experts in mxfp4, as gpt-oss has them: 32 numbers of 4 bits share a power of two (OCP Microscaling formats 1.0).

On CPUs they stay codes of 4 bits with the same scales, and activations have 15 bits; on other devices they are floats
of the activations' type. The layers besides experts are floats in such a checkpoint. Float weights of all layers but
the head become such numbers as they load.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_nn import checkpoint_parameter
from ferrule_plugins.quantization.online import Mxfp4FromFloats
from ferrule_quant.code_tables import E2M1, Coded, CodedScheme, halves, powers_of_two
from ferrule_quant.method import CheckedMethod

GROUP = 32


class Mxfp4(CheckedMethod):
    conformance = "ferrule_testkit.samples.quantization:MXFP4"
    formats = ("mxfp4", "gpt_oss_mxfp4")
    from_floats = True

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        if not self.config:
            return None if layer.head else Mxfp4FromFloats(self.shared)
        return Mxfp4Scheme(self.shared) if ".experts." in layer.name else None


class Mxfp4Scheme(CodedScheme):
    """A scheme with parameters `blocks` uint8 [n, groups, 16] and `scales` uint8 [n, groups].

    The first number of a pair is in the low half.
    """

    def units(self, layer: Any) -> tuple[int, int]:
        return 1, GROUP

    def allocate(self, layer: Any) -> None:
        self.given = layer.weight.dtype
        groups = -(-layer.in_features // GROUP)
        blocks = checkpoint_parameter(layer, (-1, groups, GROUP // 2), torch.uint8)
        scales = checkpoint_parameter(layer, (-1, groups), torch.uint8)
        layer.weight, layer.blocks, layer.scales = None, blocks, scales

    def read_codes(self, layer: Any) -> Coded:
        codes = halves(layer.blocks.detach())[:, : layer.in_features]
        return Coded(codes, E2M1, powers_of_two(layer.scales.detach()), GROUP)
