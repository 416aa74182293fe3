"""The error that a number of bits implies: each weight becomes the nearest of the numbers that its group can have.

For evenly spaced numbers that is a step divided by the root of 12. For floats, whose steps double with each power of
two, it is 2^-f / sqrt(12) * sqrt(2 ln 2 / 3) of their size, with f bits of fraction. Tests hold `Rounding` to both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ferrule_plugins.quantization.bitsandbytes import TABLES

# A scheme chooses scales by its own rule, as the largest number by 7, 7.5 or 8, and rounds them.
ABOVE, BELOW = 1.3, 3.0
BFLOAT16 = 2**-7 / math.sqrt(12) * math.sqrt(2 * math.log(2) / 3)  # of what a layer gives


@dataclass(frozen=True)
class Rounding:
    """A rounding to `levels` from -1 to 1, in order, times the scale of each `group` of inputs; 0 is all of a row.

    The scale is the group's largest size; where the levels are `ranged`, they reach from its least number to its
    largest, and with `power` it is the next power of two times that number. Inputs are divided by the `factors`, in
    turn, before they are rounded, and multiplied by them afterwards.
    """

    levels: tuple[float, ...]
    group: int = 0
    ranged: bool = False
    power: float = 0.0
    factors: tuple[float, ...] = (1.0,)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return the nearest numbers of a matrix [rows, inputs]."""
        factors = torch.tensor(self.factors).repeat(values.shape[1])[: values.shape[1]]
        return self._nearest(values / factors) * factors

    def _nearest(self, values: torch.Tensor) -> torch.Tensor:
        group = self.group or values.shape[1]
        parts = F.pad(values, (0, -values.shape[1] % group)).view(len(values), -1, group)
        middle = torch.zeros(())
        scale = parts.abs().amax(2, keepdim=True)
        if self.ranged:
            low, high = parts.amin(2, keepdim=True), parts.amax(2, keepdim=True)
            middle, scale = (low + high) / 2, (high - low) / 2
        if self.power:
            scale = (scale / self.power).log2().ceil().exp2() * self.power
        levels = torch.tensor(self.levels, dtype=values.dtype)
        places = torch.bucketize((parts - middle) / scale.clamp(min=1e-30), (levels[1:] + levels[:-1]) / 2)
        return (levels[places] * scale + middle).flatten(1)[:, : values.shape[1]]


def integers(bits: int, group: int = 0) -> Rounding:
    half = 127 if bits == 8 else 1 << (bits - 1)
    return Rounding(tuple(number / half for number in range(-half, half + 1)), group)


def ranged(bits: int, group: int = 0) -> Rounding:
    """Return a rounding to integers with zero points or offsets."""
    last = (1 << bits) - 1
    return Rounding(tuple(2 * number / last - 1 for number in range(last + 1)), group, ranged=True)


def floats(fraction: int, least: int, most: float, group: int = 0) -> Rounding:
    """Return a rounding to floats with so many bits of fraction and this least exponent, up to `most`."""
    steps = [number * 2.0 ** (least - fraction) for number in range(1 << fraction)]
    exponent = least
    while 2.0**exponent <= most:
        steps += [(1 + part / (1 << fraction)) * 2.0**exponent for part in range(1 << fraction)]
        exponent += 1
    sizes = [step / most for step in steps if step <= most]
    return Rounding(tuple(sorted({*sizes, *(-size for size in sizes)})), group)


E4M3 = floats(3, -6, 448)


def e2m1(group: int, power: bool = False) -> Rounding:
    made = floats(1, 0, 6, group)
    return Rounding(made.levels, group, power=6.0 if power else 0.0)


def table(numbers: Sequence[float], group: int) -> Rounding:
    """Return a rounding to numbers in any order, of which the one of the largest size stands for the group's
    largest.
    """
    most = max(abs(number) for number in numbers)
    return Rounding(tuple(sorted(number / most for number in numbers)), group)


def coded(kind: str, group: int = 64) -> Rounding:
    """Return the rounding of nf4 or fp4 of bitsandbytes."""
    return table(TABLES[kind], group)


def implied(weights: Sequence[Rounding], activations: Rounding | None, weight: torch.Tensor, x: torch.Tensor) -> float:
    """Return the relative error of products of `x` [rows, inputs] and `weight` [outputs, inputs], as their bits imply
    it.
    """
    rounded = weight
    for each in weights:
        rounded = each(rounded)
    parts = [BFLOAT16, relative(rounded, weight), relative(activations(x), x) if activations else 0.0]
    return math.hypot(*parts)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())
