"""Products with weights of 4 bits beside torch's in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ferrule_kernels.cuda import int4
from tests.shared import grid

SHAPES = [(1, 16, 128), (3, 70, 96), (17, 64, 384), (70, 130, 256)]  # m, n, k
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}
FORMS = [(32, False), (32, True), (64, True), (128, False), (0, True)]  # group (0: all inputs), zero points


def _drawn(
    n: int, k: int, group: int, zeros: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return numbers, scales, zero points, and the weight that they encode, float64."""
    draw = torch.Generator().manual_seed(n + k + group)
    numbers = torch.randint(0, 16, (n, k), generator=draw, dtype=torch.uint8)
    width = group or k
    groups = -(-k // width)
    scales = torch.rand(n, groups, generator=draw) * 0.01 + 0.001
    scales = (scales * torch.where(torch.rand(n, groups, generator=draw) < 0.2, -1.0, 1.0)).half()
    points = torch.randint(0, 17, (n, groups), generator=draw, dtype=torch.uint8) if zeros else None
    less = torch.full((n, groups), 8) if points is None else points

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.double().repeat_interleave(width, 1)[:, :k]

    meant = (numbers.double() - spread(less)) * spread(scales)
    return numbers.to(device), scales.to(device), None if points is None else points.to(device), meant.to(device)


def _near(y: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    off = (y.double() - expected).abs().max() / expected.abs().max()
    assert off.item() <= tolerance


@grid({"m,n,k": SHAPES, "group,zeros": FORMS, "dtype": [torch.float16, torch.float32]})
def test_products(device: torch.device, m: int, n: int, k: int, group: int, zeros: bool, dtype: torch.dtype) -> None:
    numbers, scales, points, meant = _drawn(n, k, group, zeros, device)
    draw = torch.Generator().manual_seed(m)
    x, bias = torch.randn(m, k, generator=draw).to(device, dtype), torch.randn(n, generator=draw).to(device)
    packed = int4.pack(numbers, scales.to(dtype), points, group or k)
    expected = x.double() @ meant.t()
    for num_splits in (0, 3):
        y = int4.multiply(x, packed, bias, torch.float32, num_splits)
        _near(y, expected + bias, TOLERANCE[dtype])
    y = int4.multiply(x, packed)
    assert y.dtype == dtype
    _near(y, expected, TOLERANCE[dtype])


@pytest.mark.parametrize(("group", "zeros"), FORMS)
def test_unpacked_weights_are_those_that_were_packed(device: torch.device, group: int, zeros: bool) -> None:
    for n, k in ((16, 128), (70, 96), (33, 300)):
        numbers, scales, points, meant = _drawn(n, k, group, zeros, device)
        packed = int4.pack(numbers, scales, points, group or k)
        assert torch.equal(int4.unpack(packed), meant.half())  # a number times a scale is rounded once


def test_many_rows_are_multiplied_by_unpacked_weights(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, scales, points, meant = _drawn(40, 256, 64, True, device)
    packed = int4.pack(numbers, scales, points, 64)
    x, bias = torch.randn(9, 256).to(device).half(), torch.randn(40).to(device).half()
    monkeypatch.setattr(int4, "MANY", 4)
    _near(int4.multiply(x, packed, bias), x.double() @ meant.t() + bias, 3e-3)


def test_a_row_of_nan_spoils_no_other(device: torch.device) -> None:
    numbers, scales, _, _ = _drawn(32, 100, 32, False, device)
    packed = int4.pack(numbers, scales, None, 32)
    x = torch.randn(5, 100).to(device).half()
    x[2] = torch.nan
    y = int4.multiply(x, packed)
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4]].isfinite().all()
    assert torch.equal(int4.multiply(x[3:], packed), y[3:])
    assert int4.multiply(x[:0], packed).shape == (0, 32)


def test_memory_is_that_of_four_bits(device: torch.device) -> None:
    numbers, scales, points, _ = _drawn(64, 1024, 128, True, device)
    packed = int4.pack(numbers, scales, points, 128)
    held = packed.words.nbytes + packed.scales.nbytes + (0 if packed.zeros is None else packed.zeros.nbytes)
    assert held == 64 * 1024 * (4 + 16 / 128 + 8 / 128) / 8


def test_groups_that_cross_a_quarter_are_refused(device: torch.device) -> None:
    numbers, scales, _, _ = _drawn(16, 128, 16, False, device)
    with pytest.raises(ValueError, match="multiples of 32"):
        int4.pack(numbers, scales, None, 16)


def test_bfloat16_on_the_device(device: torch.device, on_gpu: bool) -> None:
    """Check only the weights under the interpreter, whose products of bfloat16 are wrong."""
    for m, n, k in [(1, 64, 128), (20, 70, 384)] + [(1, 4096, 4096), (200, 512, 1024)] * on_gpu:
        numbers, scales, points, meant = _drawn(n, k, 64, True, device)
        packed = int4.pack(numbers, scales.bfloat16(), points, 64)
        _near(int4.unpack(packed), meant, TOLERANCE[torch.bfloat16])
        if on_gpu:
            x = torch.randn(m, k, device=device).bfloat16()
            _near(int4.multiply(x, packed), x.double() @ meant.t(), 3e-2)
