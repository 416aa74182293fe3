"""The product of one row, beside torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")
from ferrule_kernels.cuda import vectors
from tests.shared import grid


@grid(
    {
        "n,k": [(5, 40), (64, 1024), (33, 1030), (1, 1)],
        "dtype": [torch.float16, torch.bfloat16],
        "biased": [True, False],
    }
)
def test_one_row(n: int, k: int, dtype: torch.dtype, biased: bool, device: torch.device) -> None:
    x, weight = torch.randn(1, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    bias = torch.randn(n, device=device).to(dtype) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    error = 2e-3 if dtype == torch.float16 else 1e-2
    torch.testing.assert_close(vectors.multiply(x, weight, bias).double(), exact, rtol=error, atol=error * k**0.5 / 8)


def test_rows_that_lie_apart(device: torch.device) -> None:
    whole = torch.randn(9, 64, device=device)
    x = torch.randn(1, 24, device=device)
    torch.testing.assert_close(vectors.multiply(x, whole[:, 8:32], None), x @ whole[:, 8:32].t())
