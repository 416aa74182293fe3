"""Codes of floats: the compiled kernel beside torch's definition."""

from __future__ import annotations

import math

import pytest
import torch

from ferrule_kernels.cpu.codes import encode
from ferrule_plugins.quantization.bitsandbytes import NF4, coded_of, encode_by_torch
from tests.unit.kernels.test_matmul import compiled

TABLE = torch.tensor(NF4)


def drawn(n: int, k: int) -> torch.Tensor:
    return torch.randn((n, k), generator=torch.Generator().manual_seed(n * 1000 + k)) * 0.05


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 64, 64), (70, 192, 64), (33, 104, 8), (5, 60, 20), (300, 512, 64)])
def test_codes_and_scales_are_those_of_torch(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    weight = drawn(n, k).to(dtype)
    for found, expected in zip(encode(weight, TABLE, group), encode_by_torch(weight, TABLE, group), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@compiled
def test_borders_zeros_and_what_is_not_finite_are_those_of_torch() -> None:
    """Encode numbers between two of the table, and next to these; a group of zeros; NaN and infinity at each place."""
    borders = (TABLE[1:] + TABLE[:-1]) / 2
    weight = torch.zeros(64, 64)
    weight[0, :15] = borders
    weight[0, 15:30] = borders.nextafter(torch.tensor(2.0))
    weight[0, 30:45] = borders.nextafter(torch.tensor(-2.0))
    weight[0, 63] = 1
    weight[2] = 1e-38
    weight[3:] = drawn(61, 64)
    for row, value in zip(range(3, 63), [math.nan, math.inf, -math.inf] * 20, strict=True):
        weight[row, row] = value
    codes, scales = encode(weight, TABLE, 64)
    expected, of_torch = encode_by_torch(weight, TABLE, 64)
    assert torch.equal(codes, expected)
    assert torch.equal(scales.nan_to_num(nan=-1), of_torch.nan_to_num(nan=-1))
    assert codes[0, :15].tolist() == list(range(15))  # the lower of two
    assert codes[0, 15:30].tolist() == list(range(1, 16))


@compiled
def test_a_transposed_matrix_and_an_empty_one() -> None:
    weight = drawn(128, 70).t()
    assert torch.equal(encode(weight, TABLE, 64)[0], encode_by_torch(weight.contiguous(), TABLE, 64)[0])
    assert [part.shape for part in encode(drawn(0, 64), TABLE, 64)] == [(0, 64), (0, 1)]
    with pytest.raises(ValueError, match="not a multiple"):
        encode(drawn(2, 60), TABLE, 64)


def test_groups_are_the_largest_that_divide_the_inputs() -> None:
    assert [coded_of(drawn(3, k)).group for k in (128, 96, 8)] == [64, 32, 8]
