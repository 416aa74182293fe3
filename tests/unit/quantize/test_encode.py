"""Floats become blocks of k-quants that stand for nearly the same, as the `gguf` package reads them too."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from ferrule_plugins.gguf.blocks import BITS, widen
from ferrule_quantize.gguf.encode import encode

# The relative error with normal weights. ggml's own quantizer has 0.073 and 0.018 of the k-quants.
BOUNDS = {"Q8_0": 0.006, "Q6_K": 0.019, "Q5_0": 0.044, "Q4_K": 0.074, "Q4_0": 0.088}


def drawn(*shape: int) -> torch.Tensor:
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(1))


def read_back(kind: str, data: np.ndarray) -> torch.Tensor:
    return widen(kind, torch.from_numpy(data.copy()), torch.float32)


@pytest.mark.parametrize("kind", BOUNDS)
def test_blocks_are_as_exact_as_their_bits(kind: str) -> None:
    weight = drawn(64, 1024)
    data = encode(kind, weight)
    got = read_back(kind, data)
    assert np.array_equal(quants.dequantize(data, GGMLQuantizationType[kind]), got.numpy())
    error = float((got - weight).norm() / weight.norm())
    assert BOUNDS[kind] / 2 < error < BOUNDS[kind]
    inputs = drawn(32, 1024)
    product = inputs @ weight.T
    assert float((inputs @ got.T - product).norm() / product.norm()) < 1.2 * BOUNDS[kind]


@pytest.mark.parametrize("kind", BOUNDS)
def test_the_size_is_that_of_the_type(kind: str) -> None:
    size, num_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert encode(kind, drawn(2, 3, 512)).shape == (2, 3, 512 // size * num_bytes)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("value", [0.0, 1e-9, 0.03, -0.03, 6e4])
def test_rows_of_one_number(kind: str, value: float) -> None:
    weight = torch.full((2, 512), value)
    error = (read_back(kind, encode(kind, weight)) - weight).abs().max()
    assert float(error) <= max(abs(value) / 2 ** BITS[kind], 1e-6)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_groups_of_very_different_sizes(kind: str) -> None:
    """Encode the scale of a group as a share of the largest one's."""
    weight = drawn(8, 512) * torch.tensor([1.0, 0.3, 0.0, 2.0]).repeat(4).repeat_interleave(32)
    error = float((read_back(kind, encode(kind, weight)) - weight).norm() / weight.norm())
    assert error < 1.2 * BOUNDS[kind]
