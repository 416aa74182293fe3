"""Sums of products of low rank: the CPU's kernel beside the definition, and the definition beside merged weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest
import torch

from ferrule_kernels.cpu import library
from ferrule_kernels.cpu.low_rank import LowRankSum
from ferrule_kernels.cpu.recording import Arena, Recording
from ferrule_kernels.low_rank import LowRank, add, quantize

FLOATS = (torch.float32, torch.bfloat16)
TYPES = [(x, y, w) for x in FLOATS for y in (x, torch.float32) for w in (x, torch.float32, torch.int8)]
compiled = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")


def filled(
    groups: int, max_rank: int, inputs: int, outputs: Sequence[int], dtype: torch.dtype, table: bool = False
) -> LowRank:
    """Make weights with a rank of its own for each group and projection; group 0 has none, and NaN is never read."""
    draw = torch.Generator().manual_seed(groups + inputs)
    weights = LowRank(groups, max_rank, inputs, outputs, dtype, torch.device("cpu"), table)
    whole = dtype == torch.int8
    for tensor in (weights.down, weights.up, weights.scales, weights.offsets, weights.rank_scales):
        tensor.fill_(float("nan") if tensor.is_floating_point() else 99)
    for group in range(1, groups):
        start = 0
        for projection, size in enumerate(outputs):
            rank = (group * 3 + projection * 5) % (max_rank + 1)
            weights.ranks[group, projection] = rank
            down = torch.randn(rank, inputs, generator=draw) * inputs**-0.5
            up = torch.randn(rank, size, generator=draw)
            down, up, scales = quantize(down, up) if whole else (down.to(dtype), up.to(dtype), torch.ones(rank))
            if table:
                weights.down[group, :, :rank] = down.t()
            else:
                weights.down[group, projection, :rank] = down
            weights.up[group, :rank, start : start + size] = up
            weights.rank_scales[group, projection, :rank] = scales
            start += size
        if group % 3 == 2:
            weights.changed[group] = 1
            weights.scales[group] = torch.rand(start, generator=draw) + 0.5
            weights.offsets[group] = torch.randn(start, generator=draw)
    return weights


def numbers(weights: LowRank, rows: int, x: torch.dtype, y: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows)
    given = torch.randn(rows, weights.inputs, generator=draw).to(x)
    ids = torch.randint(0, weights.inputs, (rows,), generator=draw)
    return ids if weights.table else given, torch.randn(rows, sum(weights.outputs), generator=draw).to(y)


def chosen(weights: LowRank, rows: int) -> torch.Tensor:
    return torch.randint(0, weights.groups, (rows,), generator=torch.Generator().manual_seed(rows + 1))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_the_definition_is_that_of_merged_weights() -> None:
    weights = filled(4, 5, 24, (7, 16), torch.float32)
    x, y = numbers(weights, 9, torch.float32, torch.float32)
    groups, wanted = chosen(weights, 9), y.clone()
    for row, group in enumerate(groups.tolist()):
        if weights.changed[group]:
            wanted[row] = wanted[row] * weights.scales[group] + weights.offsets[group]
        for projection, part in enumerate((slice(0, 7), slice(7, 23))):
            rank = int(weights.ranks[group, projection])
            merged = weights.up[group, :rank, part].t() @ weights.down[group, projection, :rank]
            wanted[row, part] += merged @ x[row]
    close(add(weights, x, y, groups), wanted)


def test_integers_are_within_half_a_step_of_the_numbers() -> None:
    draw = torch.Generator().manual_seed(0)
    down, up = torch.randn(5, 300, generator=draw), torch.randn(5, 200, generator=draw) * 1e-3
    down[1], up[2] = 0, 0
    small_down, small_up, scales = quantize(down, up)
    assert int(small_down.abs().max()) == int(small_up.abs().max()) == 127
    largest = down.abs().amax(1, keepdim=True) * up.abs().amax(1).unsqueeze(1)
    for rank in range(5):  # |ab - AB| <= |a - A| |b| + |A| |b - B|, each of them half a 127th of the largest
        found = torch.outer(small_down[rank].float(), small_up[rank].float()) * scales[rank]
        assert (found - torch.outer(down[rank], up[rank])).abs().max() <= largest[rank] / 127
    assert not torch.isfinite(quantize(down, up.index_fill(0, torch.tensor([3]), float("inf")))[2][3])
    assert not torch.isfinite(quantize(down, up.index_fill(0, torch.tensor([3]), float("nan")))[2][3])


@compiled
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, (64,)), (70, (33, 5, 130)), (3, (1, 1)), (1100, (600,))])
def test_the_kernel_is_the_definition(
    types: tuple[torch.dtype, ...], table: bool, inputs: int, outputs: tuple[int, ...]
) -> None:
    if table and len(outputs) > 1:
        outputs = outputs[:1]
    weights = filled(7, 9, inputs, outputs, types[2], table)
    kernel = LowRankSum(weights)
    for rows in (1, 2, 5, 33, 150):
        x, y = numbers(weights, rows, types[0], types[1])
        groups = chosen(weights, rows)
        wanted = add(weights, x, y.clone(), groups)
        found = kernel(x, y.clone(), groups)
        close(found, wanted)
        none = groups == 0
        assert torch.equal(found[none], y[none])
        for row in range(min(rows, 6)):  # alone each has the same bits
            assert torch.equal(kernel(x[row : row + 1], y[row : row + 1].clone(), groups[row : row + 1])[0], found[row])


@compiled
def test_other_types_are_computed_in_float32() -> None:
    weights = filled(3, 4, 32, (32,), torch.float32)
    x, y = numbers(weights, 4, torch.float16, torch.float16)
    groups = torch.tensor([0, 1, 2, 1])
    close(LowRankSum(weights)(x, y.clone(), groups), add(weights, x, y.clone(), groups))
    assert LowRankSum.of(filled(3, 4, 32, (32,), torch.float16)) is None


@compiled
def test_what_is_given_is_changed_also_where_it_is_a_view() -> None:
    weights = filled(3, 4, 32, (32,), torch.float32)
    x, y = numbers(weights, 4, torch.float32, torch.float32)
    groups = torch.tensor([0, 1, 2, 1])
    view = torch.cat([y, y], dim=1)[:, :32]
    LowRankSum(weights)(x, view, groups)
    close(view, add(weights, x, y.clone(), groups))
    with pytest.raises(ValueError, match="groups are int64, not torch.int32"):  # half as many bytes as are read
        LowRankSum(weights)(x, y, groups.int())


@compiled
def test_a_recording_follows_groups_and_weights() -> None:
    library.load()
    weights = filled(5, 6, 40, (48,), torch.float32)
    kernel = LowRankSum(weights)
    x, y = numbers(weights, 4, torch.float32, torch.float32)

    def step(inputs: list[torch.Tensor]) -> torch.Tensor:
        return kernel(inputs[0], inputs[1] * 1.0, inputs[2])

    recording = Recording(Arena(), [x, y, torch.tensor([0, 0, 0, 0])], step)
    assert torch.equal(recording.output, y)
    for groups in (torch.tensor([1, 2, 0, 1]), torch.tensor([4, 4, 4, 4])):
        recording.fill([x, y, groups])
        close(recording.replay(), add(weights, x, y.clone(), groups))
    weights.up[4] = weights.up[4].nan_to_num() * 2
    close(recording.replay(), add(weights, x, y.clone(), torch.tensor([4, 4, 4, 4])))
