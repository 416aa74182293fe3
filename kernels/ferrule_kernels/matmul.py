"""Products with quantized weights, in torch: the reference for the kernels, used where no kernel runs.

A weight [n, k] is cut into groups of inputs; each group of each row has a scale, which is a float of 16 bits, or an
integer times such a float of several groups. A row of activations is quantized when it comes, with a scale for each of
the same groups, to one or two int8 numbers. Within a group, sums are of integers and exact; the sums of groups are
added in float32, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_TINY = 1e-30  # activations and weights are zero in a group that has none beyond it


@dataclass(frozen=True)
class Form:
    """The form in which weights are stored.

    `group` counts inputs; 0 is all of them. `digits` counts those of activations, 1 or 2. With `offsets` each group has
    a float that is added to its weights, beside the scale.

    Numbers of 8 bits are from -127 to 127. Numbers of 2 to 6 bits are signed, as 4 bits are from -8 to 7, and the sign
    of a group's largest number gets the longer half. With a `table` of 16 such numbers of 8 bits, weights of 4 bits are
    codes from 0 to 15: indices into it.

    Scales and offsets are bfloat16. With `halves` they are float16, and numbers that have offsets begin at 0. With
    `block`, each scale and offset covers so many inputs, and each group has `steps`, integers that multiply them: of 8
    bits from -127 to 127, or, for forms that have offsets too, of 4 bits from 0 to 15.
    """

    bits: int
    group: int = 0
    digits: int = 1
    offsets: bool = False
    table: tuple[int, ...] = ()
    halves: bool = False
    block: int = 0
    steps: int = 0

    @property
    def unit(self) -> int:
        """Groups are a multiple of so many inputs. Within blocks, two groups of 16 numbers of 3 bits share a word."""
        if self.bits == 3 and self.group == 16 and self.block and self.block % 32 == 0:
            return 16
        return {2: 16, 3: 32, 5: 32, 6: 16}.get(self.bits, 8)

    @property
    def lowest(self) -> int:
        """The least number; of codes too."""
        return 0 if self.table or self.halves and self.offsets else -min(127, 1 << (self.bits - 1))

    @property
    def problem(self) -> str | None:
        """Return why no weights are stored in this form, or None."""
        if self.bits not in (2, 3, 4, 5, 6, 8):
            return f"numbers have 2, 3, 4, 5, 6 or 8 bits, not {self.bits}"
        if self.group < 0 or self.group % self.unit:
            return f"groups of numbers of {self.bits} bits are a multiple of {self.unit} inputs, not {self.group}"
        if self.table and (
            self.bits != 4 or len(self.table) != 16 or not all(-127 <= one <= 127 for one in self.table)
        ):
            return "a table has 16 numbers from -127 to 127, for codes of 4 bits"
        if self.block < 0 or self.block and (not self.group or self.block % self.group):
            return f"blocks are whole groups: {self.block} inputs are not some of {self.group}"
        if self.steps not in ((4, 8) if self.block and self.offsets else (8,) if self.block else (0,)):
            return f"groups within blocks have steps of 8 bits, or of 4 where they have offsets, not {self.steps}"
        return None

    def widths(self, inputs: int) -> tuple[int, int]:
        """Return (inputs of a group, inputs including those that pad the last group or block)."""
        group = self.group or -(-inputs // self.unit) * self.unit
        whole = self.block or group
        return group, -(-inputs // whole) * whole

    def packed_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a matrix, with its scales, in whole tiles of 16 outputs."""
        group, padded = self.widths(inputs)
        block, both = self.block or group, 1 + self.offsets
        steps = padded // group * (both * self.steps // 8)
        return -(-outputs // 16) * 16 * (padded // block * 2 * both + steps + padded * self.bits // 8)


@dataclass(frozen=True)
class Levels:
    """Scales or offsets of groups: `floats` [n, blocks], and `steps` int8 [n, groups] that multiply them, or None."""

    floats: torch.Tensor
    steps: torch.Tensor | None = None

    def spread(self) -> torch.Tensor:
        """Return the level of each group, float32 [n, groups]: exact where floats have 16 bits."""
        if self.steps is None:
            return self.floats
        return self.floats.repeat_interleave(self.steps.shape[1] // self.floats.shape[1], 1) * self.steps


@dataclass(frozen=True)
class Quantized:
    """Numbers int8 [n, groups, group]; scales, and offsets or None, float32 [n, groups].

    Here numbers are what codes stand for, where a form has a table.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    def weights(self, inputs: int) -> torch.Tensor:
        """Return the weights that the numbers stand for, float32 [n, inputs]."""
        cells = self.numbers * self.scales[..., None]
        return (cells if self.offsets is None else cells + self.offsets[..., None]).flatten(1)[:, :inputs]


def quantize(weight: torch.Tensor, form: Form) -> Quantized:
    """Quantize weight [n, k], of any float type."""
    parts = _groups(weight.float(), form)
    lowest, highest = parts.amin(dim=2), parts.amax(dim=2)
    most = torch.where(highest >= -lowest, highest, lowest)
    most = torch.where(most.abs() > _TINY, most, 0.0)
    if form.bits == 8:
        scales = (most.abs() / 127).bfloat16().float()
        return Quantized(_divided(parts, scales).clamp(-127, 127).to(torch.int8), scales)
    best, least, half = torch.zeros_like(most), torch.full_like(most, torch.inf), 1 << (form.bits - 1)
    for step in range(12):  # of the scales around the one that just fits, the one that loses least
        scales = (most * 5 / (step - 42) * (8 / half)).bfloat16().float()
        lost = _divided(parts, scales).clamp(-half, half - 1).mul(scales[..., None]).sub(parts).square().sum(2)
        best, least = torch.where(lost < least, scales, best), torch.minimum(lost, least)
    return Quantized(_divided(parts, best).clamp(-half, half - 1).to(torch.int8), best)


def multiply(x: torch.Tensor, weight: Quantized, form: Form, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [m, k] by the transposed weight [n, k]: float32 [m, n]. A row's result is the same in any batch."""
    parts = _groups(x.float(), form)
    reach = 127.0 if form.digits == 1 else 127.0 * 256.0
    most = parts.abs().amax(dim=2)
    scales = torch.where(most > _TINY, most / reach, 0.0)
    scales = torch.where(most.isfinite(), scales, torch.nan)
    inverse = torch.where((most > _TINY) & most.isfinite(), reach / most, 0.0)
    numbers = (parts * inverse[..., None]).round().nan_to_num(0.0)
    y = x.new_zeros((x.shape[0], weight.numbers.shape[0]), dtype=torch.float32)
    for group in range(parts.shape[1]):
        sums = numbers[:, group].double() @ weight.numbers[:, group].double().t()  # of integers: exact in any order
        y += sums.float() * scales[:, group, None] * weight.scales[None, :, group]
        if weight.offsets is not None:
            y += (numbers[:, group].sum(1) * scales[:, group])[:, None] * weight.offsets[None, :, group]
    return y if bias is None else y + bias.float()


def _groups(x: torch.Tensor, form: Form) -> torch.Tensor:
    """Cut rows [rows, inputs] into groups, [rows, groups, group], padded with zeros."""
    group, padded = form.widths(x.shape[1])
    return torch.nn.functional.pad(x, (0, padded - x.shape[1])).view(x.shape[0], -1, group)


def _divided(parts: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Divide numbers by their scales and round to integers, ties to even; zero where the scale is zero."""
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales)
    return (parts * inverse[..., None]).round()
