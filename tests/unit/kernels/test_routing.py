"""Choices of experts, the order of their rows, and sums of their results, beside their definitions in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ferrule_kernels import moe
from ferrule_kernels.cpu import library, routing
from ferrule_kernels.moe import Routing
from tests import compiler

try:
    library.load()
except library.KernelsUnavailableError as error:
    pytest.skip(f"there are no compiled kernels here: {error}", allow_module_level=True)

ROUTINGS = {
    "mixtral": Routing(num_experts=8, top_k=2),
    "odd": Routing(num_experts=13, top_k=5, renormalise=False, scale=2.0),
    "one": Routing(num_experts=4, top_k=1, scores="sigmoid", renormalise=False),
    "all": Routing(num_experts=3, top_k=3),
    "deepseek-v2": Routing(num_experts=20, top_k=6, groups=4, kept_groups=2, renormalise=False, scale=16.0),
    "deepseek-v3": Routing(
        num_experts=256, top_k=8, scores="sigmoid", groups=8, kept_groups=4, group_depth=2, scale=2.5
    ),
}


@pytest.fixture(scope="module", params=["installed", "x86-64-v3", "x86-64-v4"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use the installed library, then the kernels for processors that this one can stand for."""
    if request.param == "installed":
        yield
        return
    needed = {"x86-64-v3": "avx2", "x86-64-v4": "avx512f"}[request.param]
    if needed not in library.features():
        pytest.skip(f"the processor has no {needed}")
    source = Path(library.__file__).with_name("routing.cpp")
    target = compiler.shared_library(source, flags=[f"-march={request.param}"])
    caches = routing._route, routing._arrange, routing._combine
    with pytest.MonkeyPatch.context() as patch:
        loaded = ctypes.CDLL(str(target))
        patch.setattr(library, "load", lambda: loaded)
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


def _equal(logits: torch.Tensor, choice: Routing, bias: torch.Tensor | None = None) -> None:
    weights, ids = routing.route(logits, choice, bias)
    expected_weights, expected_ids = moe.route(logits, choice, bias)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", list(ROUTINGS))
def test_route(name: str, biased: bool) -> None:
    choice = ROUTINGS[name]
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(300, choice.num_experts, generator=draw)
    _equal(logits, choice, torch.randn(choice.num_experts, generator=draw) if biased else None)
    _equal(logits[:0], choice)
    _equal(logits[:5].bfloat16(), choice)


@pytest.mark.parametrize("name", list(ROUTINGS))
def test_of_equal_scores_the_first_wins_and_what_is_not_a_number_is_chosen_last(name: str) -> None:
    choice = ROUTINGS[name]
    logits = torch.zeros(6, choice.num_experts)
    logits[1, 1::2] = 1.0
    logits[2, 0] = float("nan")
    logits[3, 1:] = float("-inf")
    logits[4, -1] = float("inf")
    logits[5] = float("-inf")
    _equal(logits, choice)
    bias = torch.zeros(choice.num_experts)
    bias[::2], bias[1] = float("-inf"), float("inf")
    _equal(logits, choice, bias)


def test_rows_of_a_wider_matrix() -> None:
    _equal(torch.randn(5, 20)[:, 3:11], ROUTINGS["mixtral"])


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 3), (1, 8, 256), (50, 3, 7), (9, 1, 4)])
def test_arrange(tokens: int, top_k: int, experts: int) -> None:
    ids = torch.rand(tokens, experts).argsort(1)[:, :top_k].int()
    got, expected = routing.arrange(ids, experts), moe.arrange(ids, experts)
    assert all(torch.equal(mine, its) for mine, its in zip(got, expected, strict=True))
    assert torch.equal(ids.flatten()[got.places.argsort()], ids.flatten().sort().values)
    assert torch.equal(routing.arrange(ids.long(), experts).places, got.places)


@pytest.mark.parametrize("wrong", [-1, 7, 2**31 - 1, -(2**31)])
def test_an_id_that_is_no_expert_is_refused(wrong: int) -> None:
    with pytest.raises(IndexError, match="none of the 7"):
        routing.arrange(torch.tensor([[0, 6], [3, wrong]], dtype=torch.int32), 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "top_k", "size"), [(1, 2, 64), (7, 3, 50), (40, 8, 130)])
def test_combine(dtype: torch.dtype, tokens: int, top_k: int, size: int) -> None:
    rows, weights = torch.randn(tokens * top_k, size).to(dtype), torch.rand(tokens, top_k)
    exact = 1e-6 if dtype == torch.float32 else 1e-2
    for places in (None, torch.randperm(tokens * top_k)):
        got, expected = routing.combine(rows, weights, places), moe.combine(rows, weights, places)
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=exact, atol=exact)
        mine = None if places is None else places[-top_k:]
        last = routing.combine(rows if places is not None else rows[-top_k:], weights[-1:], mine)
        assert torch.equal(last, got[-1:])  # the same bits alone
