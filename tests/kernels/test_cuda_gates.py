"""Activations beside the functions that the layers have for the same names."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from ferrule_kernels.cuda import gates
from ferrule_nn.mlp import ACTIVATIONS, activation

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = CLOSE[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def _rows(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    x = torch.randn(3, size, device=device) * 4
    x[0, :7] = torch.tensor([0.0, -0.0, 1e4, -1e4, 1e-3, -0.1249, 0.1251], device=device)
    return x.to(dtype)


def test_every_name_has_a_kernel() -> None:
    assert set(gates.GATES) == set(ACTIVATIONS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", list(gates.GATES))
def test_gate_and_activation(act: str, dtype: torch.dtype, device: torch.device) -> None:
    x = _rows(48, dtype, device)
    x = x.clamp(-100, 100) if act == "relu2" and dtype == torch.float16 else x  # whose square would not be finite
    gate, up = x.chunk(2, dim=-1)
    _close(gates.Gate(act, 24)(x), activation(act)(gate) * up)
    _close(gates.Activation(act, 48)(x), activation(act)(x))


@pytest.mark.parametrize("size", [1, 24, 1024, 1500])
def test_widths(size: int, device: torch.device) -> None:
    x = torch.randn(3, 2 * size, device=device)
    kernel = gates.Gate("silu", size)
    out = kernel(x)
    _close(out, torch.nn.functional.silu(x[:, :size]) * x[:, size:])
    assert torch.equal(kernel(x[1:2]), out[1:2])
    wide = torch.randn(3, 2 * size + 5, device=device)[:, 2 : 2 + 2 * size]
    _close(kernel(wide), torch.nn.functional.silu(wide[:, :size]) * wide[:, size:])


@pytest.mark.parametrize("act", list(gates.GATES))
def test_what_is_not_a_number_stays_so(act: str, device: torch.device) -> None:
    x = torch.ones(2, 8, device=device)
    x[0, 3] = float("nan")
    out = gates.Activation(act, 8)(x)
    assert out[0, 3].isnan()
    assert out.isnan().sum() == 1


def test_no_rows(device: torch.device) -> None:
    assert gates.Gate("silu", 8)(torch.ones(0, 16, device=device)).shape == (0, 8)


def test_every_case_runs(device: torch.device) -> None:
    assert [case.bytes > 0 and case.run() is not None for case in gates.cases(device)]
