"""Weights as codes of 4 bits: a number of a table of 16, times the scale of its group.

The tables are those of e2m1 (OCP Microscaling formats 1.0: mxfp4 and nvfp4 have it) and of bitsandbytes' nf4 and fp4.
Codes are looked up as numbers of 8 bits: what e2m1 stands for exactly, and a number of nf4 or fp4 to half of 1/127 of
its group's largest. Scales are rounded to bfloat16. On a GPU, which has no kernel for that, they are floats of the
activations' type.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from ferrule_quant.products import Integers, Quantized, Shared, Wide, products_of

_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_HALF, *(-value for value in _HALF))
_WHY = "no kernel of this device looks up codes of 4 bits: such weights take 16 bits, or 32 with --dtype float32"


@dataclass(frozen=True)
class Coded:
    """Codes uint8 [n, k], each a place in `table`; scales float32 [n, groups], each for `group` inputs."""

    codes: torch.Tensor
    table: tuple[float, ...]
    scales: torch.Tensor
    group: int

    def integers(self) -> Integers:
        """Return the weights as integers with a table of 8-bit numbers, in units of 0.5 for e2m1, else of max / 127."""
        most = max(abs(value) for value in self.table)
        step = 0.5 if self.table == E2M1 else most / 127
        numbers = tuple(round(value / step) for value in self.table)
        return Integers(self.codes, self.scales * step, None, 4, self.group, table=numbers)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights that the codes stand for, [n, k]."""
        table = torch.tensor(self.table, device=self.codes.device)
        scales = self.scales.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]
        return (table[self.codes.int()] * scales).to(dtype)


class CodedScheme(Quantized):
    """A scheme that packs what `read_codes` returns for a layer with loaded parameters.

    Activations are not quantized.
    """

    def __init__(self, shared: Shared, dtype: torch.dtype | None = None) -> None:
        super().__init__(shared, dtype, wide=True)

    @abstractmethod
    def read_codes(self, layer: Any) -> Coded:
        """Return the codes in the layer's parameters. Raises CheckpointError for invalid ones."""

    def weights(self, layer: Any) -> Integers | Wide:
        coded = self.read_codes(layer)
        return coded.integers() if products_of(layer).looks_up else Wide(coded.widened(self.given), _WHY)


def halves(pairs: torch.Tensor, first_is_low: bool = True) -> torch.Tensor:
    """Split bytes [n, ...] of two codes each into codes uint8 [n, k]."""
    low, high = pairs & 15, pairs >> 4
    return torch.stack((low, high) if first_is_low else (high, low), dim=-1).flatten(1)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Convert scales of type e8m0, uint8, to float32. 255 is NaN."""
    return torch.exp2(exponents.float() - 127).masked_fill(exponents == 255, torch.nan)
