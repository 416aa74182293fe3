"""What is said of a model whose first step computes numbers that are not finite."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from ferrule.assembly.self_check import check_finite
from ferrule.errors import CheckpointError


class Scaled(torch.nn.Module):
    """A layer that overflows."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * 1e30 * 1e30


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), Scaled(), torch.nn.Linear(4, 4))


def test_tensors_that_are_not_finite_are_named() -> None:
    broken = model()
    with torch.no_grad():
        broken[0].weight[1, 2] = math.nan
        broken[2].bias[0] = -math.inf
    with pytest.raises(CheckpointError, match=r"NaN or infinity in 0\.weight, 2\.bias\."):
        check_finite(broken, 32, lambda token: True)


def test_a_layer_that_overflows_is_named() -> None:
    broken = model()

    def failing(token: int) -> bool:
        return not bool(torch.isfinite(broken(torch.ones(4))).all())

    with pytest.raises(CheckpointError, match="first behind 1, although its weights are finite") as caught:
        check_finite(broken, 32, failing)
    assert "--dtype" in caught.value.hint
    assert not any(part._forward_hooks for part in broken.modules())


def test_a_single_token_that_overflows_does_not_stop_a_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ferrule"):
        check_finite(model(), 32, lambda token: token < 20)
    assert "for some tokens" in caplog.text


def test_models_that_are_not_of_torch_are_asked_for_tokens_alone() -> None:
    with pytest.raises(CheckpointError, match="not finite, although"):
        check_finite(object(), 32, lambda token: True)
