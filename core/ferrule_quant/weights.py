"""Weights as integers with scales, and their groups as kernels read them: sorted, for activations that are gathered."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ferrule.errors import CheckpointError
from ferrule_kernels.matmul import Form, Levels

_ROWS = 4096  # that are widened at a time


@dataclass(frozen=True)
class Integers:
    """Weights (numbers - zeros) * scales of 1 to 8 `bits`, whose scales are for `group` inputs, 0 for all.

    Numbers of 8 bits are int8 [n, k]; of fewer uint8, from 0 on. Zeros are integers or floats [n, groups]; None is the
    middle: 0 for 8 bits, else half the range. Scales are float32 [n, groups], as are `offsets`, which are added to
    weights without zeros. `index` [k] says which group each input belongs to, where groups are not neighbours. With a
    `table` of 16 numbers of 8 bits, numbers of 4 bits are codes: places in it. They have no zeros.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int = 0
    offsets: torch.Tensor | None = None
    index: torch.Tensor | None = None
    table: tuple[int, ...] = ()

    @property
    def middle(self) -> int:
        """The number that stands for 0 without zero points."""
        return 0 if self.bits == 8 else 1 << (self.bits - 1)

    def groups(self) -> torch.Tensor:
        """Return the group of each input, int64 [k]. Raises CheckpointError for a group that does not exist."""
        k, device = self.numbers.shape[1], self.numbers.device
        if self.index is None:
            return torch.arange(k, device=device) // (self.group or k)
        index = self.index.long()
        if index.shape != (k,) or int(index.min()) < 0 or int(index.max()) >= self.scales.shape[1]:
            raise CheckpointError("The checkpoint puts inputs of a layer into groups that the layer does not have.")
        return index

    def centred(self) -> torch.Tensor:
        """Return the numbers less the middle of their range, or the numbers that codes stand for, int8."""
        if self.table:
            return looked_up(self.table, self.numbers)
        return self.numbers if self.bits == 8 else self.numbers.view(torch.int8) - self.middle

    def added(self) -> torch.Tensor | None:
        """Return the floats that offsets or zero points add to centred numbers times scales: [n, groups], or None."""
        return self.offsets if self.zeros is None else self._less(self.middle, self.zeros)

    def _less(self, shift: torch.Tensor | int, zeros: torch.Tensor) -> torch.Tensor | None:
        """Return the float to add for numbers that were reduced by `shift`; None where it is zero throughout."""
        moved = shift - (zeros if zeros.is_floating_point() else zeros.to(torch.int32))
        return moved * self.scales if bool((moved != 0).any()) else None

    def fitted(self, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return numbers from `low` to `high`, int8, and the float added to each times its scale, [n, groups] or None.

        Each group is shifted by the integer nearest to its zero point that leaves its numbers in that range. Of numbers
        that have one value more than the range, the largest lose a step.
        """
        if self.zeros is None or bool((self.zeros == self.middle).all()):
            numbers = self.centred()
            return (numbers.clamp(low, high) if numbers is self.numbers else numbers.clamp_(low, high)), self.offsets
        numbers = self.numbers.to(torch.int16) if self.bits == 8 else self.numbers.view(torch.int8)
        group, k = self.group or numbers.shape[1], numbers.shape[1]
        if missing := -k % group:
            numbers = torch.cat((numbers, numbers[:, -1:].expand(-1, missing)), 1)
        cells = numbers.reshape(len(numbers), -1, group)
        shift = torch.maximum(self.zeros.round().to(torch.int16), cells.amax(2).short() - high)
        shift = torch.minimum(shift, cells.amin(2).short() - low)
        moved = (cells - shift.to(cells.dtype).unsqueeze(-1)).clamp_(low, high)  # exact: what an int8 loses comes back
        return moved.to(torch.int8).flatten(1)[:, :k], self._less(shift.to(torch.int32), self.zeros)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights that the numbers stand for, [n, k]."""
        index, added, rows = self.groups(), self.added(), []
        for first in range(0, len(self.numbers), _ROWS):  # no second matrix of float32
            part = slice(first, first + _ROWS)
            weight = self.centred()[part] * self.scales[part].index_select(1, index)
            rows.append((weight if added is None else weight + added[part].index_select(1, index)).to(dtype))
        return torch.cat(rows)


@dataclass(frozen=True)
class Levelled:
    """Weights in a `form` of the CPU's kernel: its numbers or codes, int8 [n, k], scales and offsets."""

    numbers: torch.Tensor
    form: Form
    scales: Levels
    offsets: Levels | None = None

    def integers(self) -> Integers:
        """Return the same weights with a float for each group, for kernels without levels."""
        form, scales, offsets = self.form, self.scales.spread(), None
        half = 0 if form.table or form.bits == 8 else 1 << (form.bits - 1)
        if self.offsets is not None:
            offsets = self.offsets.spread()
            offsets = offsets + scales * half if form.lowest == 0 else offsets
        numbers = self.numbers if form.bits == 8 else (self.numbers + (0 if form.lowest == 0 else half)).to(torch.uint8)
        return Integers(numbers, scales, None, form.bits, form.group, offsets, table=form.table)


def looked_up(table: tuple[int, ...], numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers that codes stand for, int8; without a table, the numbers themselves."""
    return torch.tensor(table, dtype=torch.int8, device=numbers.device)[numbers.int()] if table else numbers


def sorted_by_group(weights: Integers, multiple: int) -> tuple[Integers, torch.Tensor | None]:
    """Return the weights with groups of a multiple of `multiple` inputs, each group's inputs next to each other.

    Also returns the input that each column multiplies, int32, or None where columns are inputs. The number of inputs
    stands for columns that only fill up a group. Raises CheckpointError for inputs of no group, or of too large ones.
    """
    k, size, count = weights.numbers.shape[1], weights.group, weights.scales.shape[1]
    if count == 1:
        return replace(weights, group=0, index=None), None
    if weights.index is None and size % multiple == 0:
        return weights, None
    device, index = weights.numbers.device, weights.groups()
    counts = index.bincount(minlength=count)
    if int(counts.max()) > size:
        raise CheckpointError(f"The checkpoint puts more than {size} inputs of a layer into one group.")
    width, order = -(-size // multiple) * multiple, index.sort(stable=True).indices
    groups, starts = index[order], counts.cumsum(0) - counts
    columns = torch.full((count, width), k, device=device)
    columns[groups, torch.arange(k, device=device) - starts[groups]] = order
    flat = columns.flatten()[: (count - 1) * width + int(counts[-1])]  # kernels fill up the last group themselves
    if torch.equal(flat, torch.arange(k, device=device)):
        return replace(weights, index=None), None
    numbers = F.pad(weights.numbers, (0, 1)).index_select(1, flat)
    return replace(weights, numbers=numbers, group=width, index=None), flat.int()


def gathered(x: torch.Tensor, order: torch.Tensor, padded: bool) -> torch.Tensor:
    """Return activations [tokens, inputs] in that order; `padded` says that some columns have no input."""
    return (F.pad(x, (0, 1)) if padded else x).index_select(1, order)
