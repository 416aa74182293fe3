"""Norms and rotation of heads in place, beside the layers' own."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from ferrule_kernels.cuda import rope
from ferrule_kernels.cuda.norms import RMSNorm
from ferrule_nn import RMSNorm as Norm
from ferrule_nn import Rope, RopeConfig
from tests.shared import grid

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}  # a few products are rounded one by one
TOKENS, Q, K, V = 5, 6, 2, 2


def _layer(dim: int, partial: float, interleaved: bool, device: torch.device) -> tuple[Rope, Any]:
    places: Any = SimpleNamespace(positions=torch.arange(3, 3 + TOKENS, device=device), lengths=None)
    with device:
        return Rope(RopeConfig.of({"partial_rotary_factor": partial}, dim), interleaved), places


def _norm(dim: int, offset: float, dtype: torch.dtype, device: torch.device) -> Norm:
    layer = Norm(dim, 1e-5, offset).to(device, dtype)
    nn.init.normal_(layer.weight, std=0.5)
    return layer


@grid(
    {
        "dtype": DTYPES,
        "dim": [24, 128],
        "partial,interleaved,normed": list(product((1.0, 0.5), (False, True), (False, True))),
    }
)
def test_heads(
    dtype: torch.dtype, dim: int, partial: float, interleaved: bool, normed: bool, device: torch.device
) -> None:
    layer, places = _layer(dim, partial, interleaved, device)
    q_norm, k_norm = _norm(dim, 0.0, dtype, device), _norm(dim, 1.0, dtype, device)
    rotation = layer.at(places, dtype)
    x = torch.randn(TOKENS, Q + K + V, dim, device=device).to(dtype)
    q, k, v = x.split([Q, K, V], dim=1)
    before = torch.cat((q_norm(q), k_norm(k)), dim=1) if normed else x[:, : Q + K]
    expected = torch.cat((layer.rotate(before, rotation), v), dim=1)

    made = [RMSNorm(norm.weight, norm.eps, norm.offset) for norm in (q_norm, k_norm)] if normed else []
    kernel = rope.Heads((Q, K), dim, made, layer.dim, interleaved)
    assert kernel.accepts(x)
    one = x[2:3].clone()
    kernel(x, rotation)
    torch.testing.assert_close(x, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert torch.equal(x[:, Q + K :], v)
    kernel(one, (rotation[0][2:3], rotation[1][2:3]))
    assert torch.equal(one[0], x[2])


@pytest.mark.parametrize("rotation", [False, True])
def test_rows_that_hold_more_than_heads(rotation: bool, device: torch.device) -> None:
    """Apply norms alone where there is no rotation, without touching what lies beside the rows."""
    layer, places = _layer(16, 1.0, False, device)
    norms = [_norm(16, 0.0, torch.float32, device) for _ in range(2)]
    wide = torch.randn(TOKENS, 200, device=device)
    kept = wide.clone()
    x = wide[:, : (Q + K) * 16].view(TOKENS, Q + K, 16)
    expected = torch.cat((norms[0](x[:, :Q]), norms[1](x[:, Q:])), dim=1)
    made = [RMSNorm(norm.weight, norm.eps, norm.offset) for norm in norms]
    turn = layer.at(places, torch.float32) if rotation else None
    rope.Heads((Q, K), 16, made, 16, False)(x, turn)
    expected = expected if turn is None else layer.rotate(expected, turn)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(wide[:, (Q + K) * 16 :], kept[:, (Q + K) * 16 :])


def test_queries_without_keys_and_nothing_to_do(device: torch.device) -> None:
    layer, places = _layer(16, 1.0, True, device)
    rotation = layer.at(places, torch.float32)
    x = torch.randn(TOKENS, 3, 16, device=device)
    expected = torch.cat((layer.rotate(x[:, :2], rotation), x[:, 2:]), dim=1)
    rope.Heads((2, 0), 16, [], 16, True)(x, rotation)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)
    before = x.clone()
    rope.Heads((2, 1), 16, [], 0, False)(x, None)
    assert torch.equal(x, before)


def test_types(device: torch.device) -> None:
    norm = RMSNorm(torch.ones(16, device=device), 1e-6)
    kernel = rope.Heads((2, 1), 16, [norm, norm], 16, False)
    assert not kernel.accepts(torch.ones(1, 3, 16, dtype=torch.bfloat16, device=device))
    assert not rope.Heads((2, 1), 16, [], 16, False).accepts(torch.ones(1, 3, 16, dtype=torch.float64, device=device))


def test_every_case_runs(device: torch.device) -> None:
    for case in rope.cases(device):
        assert case.bytes > 0
        case.run()
