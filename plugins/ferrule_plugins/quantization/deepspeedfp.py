"""`deepspeedfp`: float weights rounded to floats of 6 or 8 bits as they load, in groups of 512 that share a scale.

As DeepSpeed's ``FP_Quantize`` has it (https://github.com/deepspeedai/DeepSpeed, deepspeed/ops/fp_quantizer): 8 bits
have four of exponent and three of fraction, 6 bits three and two; the largest number of a group becomes the largest
that these have. Groups follow the matrix's order in memory. No kernel here multiplies such floats: weights are what
they stand for, in the model's type, so that nothing but accuracy is as with DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_quant.method import CheckedMethod
from ferrule_quant.products import Quantized, Shared, Wide

_FORMS = {8: (3, -6, 480.0), 6: (2, -2, 28.0)}  # by bits: those of the fraction, the least exponent, the largest number
_ROWS = 1 << 14  # groups at a time
_WHY = "floats of {} bits are rounded as DeepSpeed does, and take 16 bits here, or 32 with --dtype float32"


class DeepSpeedFp(CheckedMethod):
    """A method with the settings `bits`, 8 or 6, and `group_size`."""

    conformance: Mapping[str, Any] = {
        "config": {"quant_method": "deepspeedfp", "bits": 8, "group_size": 512},
        "sizes": ((64, 48), (200, 100)),  # no memory is saved
        "lone_rows": (torch.bfloat16, torch.float32),
    }
    formats = ("deepspeedfp", "DeepSpeedFP")
    from_floats = True

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        bits, group = config.get("bits", 8), config.get("group_size", 512)
        if type(bits) is not int or bits not in _FORMS or type(group) is not int or group < 1:
            raise ValueError(f"takes 6 or 8 bits in groups of 1 or more, not {bits!r} and {group!r}")

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        if layer.head:
            return None
        return RoundedScheme(self.shared, int(self.config.get("bits", 8)), int(self.config.get("group_size", 512)))


class RoundedScheme(Quantized):
    """A scheme for float weights that are rounded once loaded."""

    def __init__(self, shared: Shared, bits: int, group: int) -> None:
        super().__init__(shared, wide=True)
        self.bits, self.group = bits, group

    def weights(self, layer: Any) -> Wide:
        weight = layer.weight.detach()
        self.given = weight.dtype
        flat = weight.flatten()
        group = min(self.group, flat.numel())
        cells = F.pad(flat, (0, -flat.numel() % group)).view(-1, group)
        rounded = torch.cat([self._rounded(part.float()).to(weight.dtype) for part in torch.split(cells, _ROWS)])
        return Wide(rounded.flatten()[: flat.numel()].view_as(weight), _WHY.format(self.bits))

    def _rounded(self, cells: torch.Tensor) -> torch.Tensor:
        fraction, least, largest = _FORMS[self.bits]
        scales = cells.abs().amax(1, keepdim=True).clamp(min=1e-30) / largest
        numbers = cells / scales
        exponents = torch.frexp(numbers).exponent - 1
        steps = torch.exp2((exponents.clamp(min=least) - fraction).float())
        return (numbers / steps).round() * steps * scales
