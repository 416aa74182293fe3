"""The division of layers among ranks: each rank's part of a parameter, and the whole parameter from all parts.

As in Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): projections into heads and into a
feed-forward block are divided by outputs, projections back by inputs, tables by rows. Key and value heads are repeated
where there are more ranks than heads; tables are filled up with zeros to a multiple of 64 rows.

A layer is made with a `Split`, which names what is never cut; with the layer's sizes it becomes a `Division`. A layer
without one is whole in each rank.

A layer says how it is divided among ranks, and nobody else does. It is made with the sizes of the whole model and a
`Split`, and allocates, loads and computes its rank's part; loading and vLLM's sharded files use the same declaration.
While a model is built its shard is in a context variable, as torch has the device there, so no model file passes it on.
The sum over ranks is a hook of the module that is not there with one rank: such a forward pass asks nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn

from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.ranks import WHOLE, Shard

OUTPUTS, INPUTS = 0, 1  # dimensions of a weight
PADDED_TO = 64  # rows of a table
ALL = slice(None)

_shard: ContextVar[Shard] = ContextVar("shard", default=WHOLE)


@contextmanager
def sharded(shard: Shard) -> Iterator[None]:
    """Have layers made inside be this shard's part. Raises ConfigError for a stage behind the first."""
    if shard.stage:
        raise ConfigError("This model cannot be divided into stages of layers.")
    token = _shard.set(shard)
    try:
        yield
    finally:
        _shard.reset(token)


def current_shard() -> Shard:
    """Return the shard of the model that is being built."""
    return _shard.get()


@dataclass(frozen=True)
class Section:
    """A section of `size` entries, in `units` that are never cut, such as heads; 0 stands for single entries.

    With `repeated`, several ranks may share a unit.
    """

    size: int
    units: int = 0
    repeated: bool = False

    def share(self, ranks: int) -> int:
        """Return how many entries one of so many ranks has. Raises ConfigError where they cannot be divided."""
        units = self.units or self.size
        if units % ranks == 0:
            return self.size // ranks
        if self.repeated and ranks % units == 0:
            return self.size // units
        raise ConfigError(f"{units} heads or rows cannot be divided among {ranks} ranks.")

    def copies(self, ranks: int) -> int:
        """Return how many ranks have the same entries."""
        return self.share(ranks) * ranks // self.size if self.size else 1


@dataclass(frozen=True)
class Division:
    """The division of a parameter's dimension `axis`, each of `sections` on its own; no sections mean no division.

    `rows` counts those of a table before it is filled up; 0 for other parameters.
    """

    axis: int = OUTPUTS
    sections: tuple[Section, ...] = ()
    rows: int = 0

    def shares(self, ranks: int) -> list[int]:
        """Return how many entries of each section one of `ranks` ranks has. Raises ConfigError."""
        return [self.rows] if self.rows and ranks == 1 else [section.share(ranks) for section in self.sections]

    def part(
        self, whole: torch.Tensor, rank: int, ranks: int, *, axis: int | None = None, among: slice = ALL
    ) -> torch.Tensor:
        """Return what one of `ranks` ranks has: a view of `whole` where that is one piece of it.

        `whole` may have several entries in one, such as a scale for a group of inputs, along its own dimension `axis`;
        or it has those `among` the sections alone. Raises ConfigError where it cannot be divided.
        """
        axis = self.axis if axis is None else axis
        sections = self.sections[among]
        if not sections or ranks == 1 and not self.rows:
            return whole
        size = sum(each.size for each in sections)
        entries = size if whole.shape[axis] == self.rows else whole.shape[axis]
        parts, start = [], 0
        for each in sections:
            share = each.share(ranks)
            first = start + rank // each.copies(ranks) * share
            if first * entries % size or share * entries % size:
                raise ConfigError(f"{entries} groups of {size} rows or inputs cannot be divided among {ranks} ranks.")
            parts.append(_narrowed(whole, axis, first * entries // size, share * entries // size))
            start += each.size
        return torch.cat(parts, dim=axis) if len(parts) > 1 else parts[0]

    def of_projections(self, sizes: Iterable[int]) -> list[slice]:
        """Return which of the sections each of several projections of these sizes has."""
        found, index = [], 0
        for size in sizes:
            first = index
            while size > 0:
                size -= self.sections[index].size
                index += 1
            found.append(slice(first, index))
        return found

    def whole(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the parameter that the parts of all ranks make. Raises CheckpointError, naming it."""
        ranks, first = len(parts), parts[0]
        if any(part.shape != first.shape or part.dtype != first.dtype for part in parts):
            raise CheckpointError(f"Tensor {name!r} has another shape or type in some of the {ranks} ranks.")
        if ranks == 1:
            merged = first
        elif not self.sections:
            if not all(torch.equal(part, first) for part in parts):
                raise CheckpointError(f"Tensor {name!r} is not divided, and differs among the {ranks} ranks.")
            merged = first
        else:
            merged = self._joined(name, parts)
        filled_up = merged.dim() > 0 and len(merged) == -(-self.rows // PADDED_TO) * PADDED_TO
        return merged[: self.rows] if self.rows and filled_up else merged

    def _joined(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        ranks, shape = len(parts), tuple(parts[0].shape)
        try:
            shares = [section.share(ranks) for section in self.sections]
        except ConfigError as error:
            raise CheckpointError(f"Tensor {name!r}: {error.message}") from None
        if self.axis >= len(shape) or shape[self.axis] != sum(shares):
            raise CheckpointError(
                f"Tensor {name!r} has the shape {shape} in each of {ranks} ranks, and the model needs {sum(shares)} "
                f"in dimension {self.axis} there.",
                "The weights do not belong to this config.json.",
            )
        split = [part.split_with_sizes(shares, dim=self.axis) for part in parts]
        pieces = [
            split[rank][index]
            for index, section in enumerate(self.sections)
            for rank in range(0, ranks, section.copies(ranks))
        ]
        return torch.cat(pieces, dim=self.axis)


def _narrowed(tensor: torch.Tensor, axis: int, start: int, count: int) -> torch.Tensor:
    """Return entries [start, start + count) of a dimension, with zeros for those behind its end: a table's filling."""
    have = max(0, min(count, tensor.shape[axis] - start))
    part = tensor.narrow(axis, min(start, tensor.shape[axis]), have)
    if have == count:
        return part
    filling = tensor.new_zeros(*tensor.shape[:axis], count - have, *tensor.shape[axis + 1 :])
    return torch.cat([part, filling], dim=axis)


def in_order(tensor: torch.Tensor, axis: int, sizes: Sequence[int], groups: int) -> torch.Tensor:
    """Return a tensor whose dimension `axis` has a share of each projection in each of `groups`, one projection after
    the other.

    `sizes` are those of the projections. Raises CheckpointError where the entries cannot be told apart.
    """
    if groups == 1 or tensor.dim() == 0 or tensor.shape[axis] == 1:  # one scale for all outputs
        return tensor
    entries = tensor.shape[axis]
    shares = [size * entries / (sum(sizes) * groups) for size in sizes]
    if any(share != int(share) for share in shares):
        raise CheckpointError(f"{entries} outputs cannot be told apart in {groups} groups.")
    axis %= tensor.dim()
    shape = (*tensor.shape[:axis], groups, -1, *tensor.shape[axis + 1 :])
    grouped = tensor.reshape(shape).split_with_sizes([int(share) for share in shares], dim=axis + 1)
    return torch.cat([share.flatten(axis, axis + 1) for share in grouped], dim=axis)


UNDIVIDED = Division()


@dataclass(frozen=True)
class Shared:
    """Units, such as key heads, that several ranks share where there are more ranks than units."""

    units: int


@dataclass(frozen=True)
class Split:
    """The dimension that ranks divide, and how many units to divide there are in each projection of the layer.

    For a single size there may be several numbers of units: it then consists of so many equal sections. Sections of
    other sizes are stated.
    """

    axis: int
    units: tuple[int | Shared | Section, ...] = ()
    table: bool = False

    def of(self, *sizes: int) -> Division:
        """Return the division of projections of these sizes, or of one parameter."""
        if self.table:
            padded = -(-sizes[0] // PADDED_TO) * PADDED_TO
            return Division(self.axis, (Section(padded),), sizes[0])
        units = self.units or (0,) * len(sizes)
        if len(sizes) < len(units):
            sizes = (sum(sizes) // len(units),) * len(units)
        return Division(self.axis, tuple(map(_section, sizes, units)))


def _section(size: int, unit: int | Shared | Section) -> Section:
    if isinstance(unit, Section):
        return unit
    return Section(size, unit.units, True) if isinstance(unit, Shared) else Section(size, unit)


def outputs(*units: int | Shared | Section) -> Split:
    """Divide a layer by its outputs, each projection by itself; no unit is cut, and 0 is for single outputs."""
    return Split(OUTPUTS, units)


def inputs(units: int = 0) -> Split:
    """Divide a layer by its inputs: the ranks' products are added up."""
    return Split(INPUTS, (units,))


ROWS = Split(OUTPUTS, table=True)  # of a table of the vocabulary, and of the head that maps back to it


class DividedParameter(nn.Parameter):
    """A rank's part of a parameter that is not a linear layer's."""

    division: Division
    shard: Shard

    def __new__(cls, data: torch.Tensor, division: Division, shard: Shard) -> DividedParameter:
        made: DividedParameter = super().__new__(cls, data, False)
        made.division, made.shard = division, shard
        return made

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a checkpoint's tensor."""
        size = self.shard.size
        return whole if size == 1 else self.division.part(whole, self.shard.rank, size)
