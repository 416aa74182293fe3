"""Sums of products of low rank on a GPU, or by Triton's interpreter: beside the definition."""

from __future__ import annotations

import pytest
import torch

from ferrule_kernels.cuda.low_rank import LowRankSum
from ferrule_kernels.low_rank import LowRank, add
from tests.unit.kernels.test_low_rank import chosen, close, filled, numbers


def on(weights: LowRank, device: torch.device) -> LowRank:
    """Return a copy of the weights on a device."""
    made = LowRank(
        weights.groups, weights.max_rank, weights.inputs, weights.outputs, weights.down.dtype, device, weights.table
    )
    for to, tensor in zip(made.tensors(), weights.tensors(), strict=True):
        to.copy_(tensor)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(70, (33, 5, 130)), (16, (16,))])
@pytest.mark.parametrize("rows", [1, 6, 270])
def test_the_kernels_are_the_definition(
    device: torch.device, dtype: torch.dtype, small: bool, table: bool, inputs: int, outputs: tuple[int, ...], rows: int
) -> None:
    weights = filled(7, 20, inputs, outputs[:1] if table else outputs, torch.int8 if small else dtype, table)
    x, y = numbers(weights, rows, dtype, dtype)
    groups = chosen(weights, rows) if rows < 100 else chosen(weights, rows).sort().values
    wanted = add(weights, x, y.clone(), groups)
    found = LowRankSum(on(weights, device))(x.to(device), y.clone().to(device), groups.to(device)).cpu()
    close(found, wanted)
    assert torch.equal(found[groups == 0], y[groups == 0])
