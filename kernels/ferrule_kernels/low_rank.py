"""Sums of a product and products of low rank (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685), each row with
matrices of its own choice. `add` is the definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LARGEST = 127  # of integers of 8 bits, so that they are as many on both sides of zero
_PIECE = 16  # rows for which weights are gathered at a time


class LowRank:
    """Pairs of matrices, `groups` of them for each of several projections of one input.

    Group g adds up[g] @ (rank_scales[g] * (down[g] @ x)) to the outputs of each projection, of rank
    `ranks[g, projection]`; rows of `down` and `up` behind that are not read. Where `changed[g]`, the product is first
    multiplied by `scales[g]`, and `offsets[g]` are added. With a `table` x are ids, which stand for columns of `down`.

    Matrices may be of integers (int8): the scales of both are in `rank_scales`, see `quantize`.

    Memory is taken when it is written, where the device allows it: `down` and `up` are not initialised, `rank_scales`
    are one, everything else is zero.
    """

    def __init__(
        self,
        groups: int,
        max_rank: int,
        inputs: int,
        outputs: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        table: bool = False,
    ) -> None:
        self.groups, self.max_rank, self.inputs, self.outputs = groups, max_rank, inputs, tuple(outputs)
        self.table = table
        shape = (groups, inputs, max_rank) if table else (groups, len(self.outputs), max_rank, inputs)
        total = sum(self.outputs)
        self.down = torch.empty(shape, dtype=dtype, device=device)
        self.up = torch.empty((groups, max_rank, total), dtype=dtype, device=device)
        self.ranks = torch.zeros((groups, len(self.outputs)), dtype=torch.int32, device=device)
        self.changed = torch.zeros(groups, dtype=torch.uint8, device=device)
        self.scales = torch.empty((groups, total), dtype=torch.float32, device=device)
        self.offsets = torch.empty((groups, total), dtype=torch.float32, device=device)
        self.rank_scales = torch.ones((groups, len(self.outputs), max_rank), dtype=torch.float32, device=device)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return every tensor that is read."""
        return self.down, self.up, self.ranks, self.changed, self.scales, self.offsets, self.rank_scales


def quantize(down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round matrices down [rank, inputs] and up [rank, outputs] to int8; return them, and `rank_scales` [rank].

    A row has one scale. So both scales of a rank are one factor of its number, and a product costs nothing more. Where
    values are not finite, neither are the scales.
    """
    down, down_scales = _rounded(down)
    up, up_scales = _rounded(up)
    return down, up, down_scales * up_scales


def _rounded(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = matrix.float().abs().amax(dim=1)
    scales = torch.where(largest == 0, 1.0, largest) / _LARGEST
    return (matrix / scales.unsqueeze(1)).round().to(torch.int8), scales


def add(weights: LowRank, x: torch.Tensor, y: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Add to y [rows, outputs] what the group of each row, `groups` [rows], makes of x [rows, inputs]. Changes y.

    Sums are float32. The work does not depend on values. Rows of a group without ranks keep their bits.
    """
    check_rows(weights, x, y, groups)
    for start in range(0, len(x), _PIECE):
        rows = slice(start, start + _PIECE)
        y[rows] = _added(weights, x[rows], y[rows], groups[rows])
    return y


def check_rows(weights: LowRank, x: torch.Tensor, y: torch.Tensor, groups: torch.Tensor) -> None:
    """Raise ValueError where sizes do not fit each other, or groups are not int64."""
    if groups.dtype != torch.int64:
        raise ValueError(f"groups are int64, not {groups.dtype}")
    inputs = () if weights.table else (weights.inputs,)
    if x.shape != (len(groups), *inputs) or y.shape != (len(groups), sum(weights.outputs)):
        raise ValueError(f"{len(groups)} rows with adapters, x {tuple(x.shape)} and y {tuple(y.shape)} do not fit")


def _added(weights: LowRank, x: torch.Tensor, y: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    ranks = weights.ranks.index_select(0, groups)  # [rows, projections]
    changed = weights.changed.index_select(0, groups).unsqueeze(1) != 0
    exists = torch.arange(weights.max_rank, device=x.device) < ranks.unsqueeze(2)  # [rows, projections, rank]
    if weights.table:
        inner = weights.down.flatten(0, 1).index_select(0, groups * weights.inputs + x).float().unsqueeze(1)
    else:
        inner = (weights.down.index_select(0, groups).float() @ x.float()[:, None, :, None]).squeeze(3)
    inner = torch.where(exists, inner * weights.rank_scales.index_select(0, groups), 0.0)
    ups = weights.up.index_select(0, groups).float().split_with_sizes(list(weights.outputs), dim=2)
    sums = [  # rows of `up` behind the rank may be anything
        (inner[:, index].unsqueeze(1) @ torch.where(exists[:, index].unsqueeze(2), up, 0.0)).squeeze(1)
        for index, up in enumerate(ups)
    ]
    wide = y.float()
    scales, offsets = weights.scales.index_select(0, groups), weights.offsets.index_select(0, groups)
    wide = torch.where(changed, wide * scales + offsets, wide)
    adapted = changed | (ranks > 0).any(1, keepdim=True)
    return torch.where(adapted, (wide + torch.cat(sums, dim=1)).to(y.dtype), y)
