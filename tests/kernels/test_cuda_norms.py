"""RMSNorm and LayerNorm beside torch's definitions; rows alone and in a batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")
from ferrule_kernels.cuda import norms
from ferrule_kernels.cuda.tiles import row_tile

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [8, 200, 1024, 1030]  # rows that share a program, and have one each; powers of two and others
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # one unit in the last place, relative


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = CLOSE[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal * (weight.float() + offset)).to(x.dtype) if offset else normal.to(x.dtype) * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, size: int, offset: float, device: torch.device) -> None:
    x, y = (torch.randn(5, size, device=device).to(dtype) * 3 for _ in range(2))
    weight = torch.randn(size, device=device).to(dtype)
    kernel = norms.RMSNorm(weight, 1e-5, offset)
    _close(kernel(x), _rms(x, weight, 1e-5, offset))
    total, out = kernel.after(x, y, 0.25)
    _close(total, x + y * 0.25)
    _close(out, _rms(total, weight, 1e-5, offset))
    one_total, one = kernel.after(x[3:4], y[3:4], 0.25)
    assert torch.equal(one_total, total[3:4])
    assert torch.equal(one, out[3:4])
    _close(kernel.after(x, y, 1.0)[0], x + y)  # the interpreter cuts where it should round to bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm(dtype: torch.dtype, size: int, biased: bool, device: torch.device) -> None:
    x, y = (torch.randn(5, size, device=device).to(dtype) + 2 for _ in range(2))
    weight, bias = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    kernel = norms.LayerNorm(weight, bias if biased else None, 1e-5)
    _close(kernel(x), F.layer_norm(x, (size,), weight, bias if biased else None, 1e-5))
    total, out = kernel.after(x, y, 1.0)
    _close(total, x + y)
    _close(out, F.layer_norm(total, (size,), weight, bias if biased else None, 1e-5))


def test_rows_apart_and_of_more_dimensions(device: torch.device) -> None:
    weight = torch.randn(16, device=device)
    kernel = norms.RMSNorm(weight, 1e-6)
    wide = torch.randn(6, 40, device=device)
    _close(kernel(wide[:, 8:24]), _rms(wide[:, 8:24], weight, 1e-6, 0.0))
    _close(kernel.after(wide[:, 8:24], wide[:, 1:17], 1.0)[1], _rms(wide[:, 8:24] + wide[:, 1:17], weight, 1e-6, 0.0))
    heads = torch.randn(6, 5, 16, device=device)[:, 1:3]
    assert kernel(heads).shape == heads.shape
    _close(kernel(heads), _rms(heads, weight, 1e-6, 0.0))
    columns = torch.randn(16, 6, device=device).t()
    _close(kernel(columns), _rms(columns, weight, 1e-6, 0.0))


def test_what_is_not_finite_stays_in_its_row(device: torch.device) -> None:
    x = torch.randn(3, 16, device=device)
    x[1, 4] = float("nan")
    out = norms.RMSNorm(torch.ones(16, device=device), 1e-6)(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_no_rows(device: torch.device) -> None:
    assert norms.RMSNorm(torch.ones(16, device=device), 1e-6)(torch.ones(0, 16, device=device)).shape == (0, 16)


def test_memory_that_a_parameter_is_given_later_is_seen(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.ones(16, device=device), requires_grad=False)
    kernel, x = norms.RMSNorm(weight, 1e-6), torch.randn(2, 16, device=device)
    before = kernel(x)
    weight.data = 2 * torch.ones(16, device=device)
    assert torch.equal(kernel(x), 2 * before)


@pytest.mark.parametrize(("size", "tile"), [(1, (1024, 1, 4)), (100, (8, 128, 4)), (4096, (1, 4096, 16))])
def test_tiles_hold_whole_rows(size: int, tile: tuple[int, int, int]) -> None:
    assert row_tile(size) == tile


def test_every_case_runs(device: torch.device) -> None:
    assert [case.bytes > 0 and case.run() is not None for case in norms.cases(device)]
