"""Best and drawn tokens in Triton against torch's definition: shapes, filters, ties, faults, neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ferrule.types import TokenSampling
from ferrule_kernels.cuda import sampling as kernels
from ferrule_plugins.sampler.draw import draw
from tests.shared import grid

NAN, INF = float("nan"), float("inf")
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e-4},
    {"temperature": 100.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"top_k": 300, "top_p": 0.7},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
]


def _samplings(each: int = 1) -> list[TokenSampling]:
    return [TokenSampling(seed=0, max_tokens=1, **given) for given in FILTERS for _ in range(each)]


def _table(samplings: Sequence[TokenSampling], noise: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    numbers = [
        [row, s.top_k, float(u), s.top_p, s.temperature, s.min_p]
        for row, s, u in zip(rows, samplings, noise, strict=True)
    ]
    return torch.tensor(numbers, dtype=torch.float64, device=noise.device)


def _draw(logits: torch.Tensor, samplings: Sequence[TokenSampling], noise: torch.Tensor) -> torch.Tensor:
    mine, found = logits.clone(), kernels.best(logits)
    kernels.draw(mine, found.most, _table(samplings, noise, range(len(logits))), found.tokens, True)
    return found.tokens


def _noise(count: int, device: torch.device) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64, device=device)


# ------------------------------------------------------------------------------------------ the best


@pytest.mark.parametrize("vocab", [1, 3, 4096, 4097, 9000])
def test_best_is_the_first_of_the_largest(vocab: int, device: torch.device) -> None:
    logits = torch.randint(-3, 4, (5, vocab), device=device).float()
    found = kernels.best(logits)
    most = logits.amax(-1)
    assert torch.equal(found.most, most)
    assert torch.equal(found.tokens, (logits == most[:, None]).int().argmax(-1))
    assert found.finite.all()


def test_rows_that_are_not_finite_are_told_and_have_a_token(device: torch.device) -> None:
    rows = [
        [0.0, 3.0, 3.0, -1.0],
        [-INF, -INF, -5.0, -INF],
        [1.0, NAN, 2.0, 0.0],
        [-INF] * 4,
        [0.0, INF, 1.0, 2.0],
        [NAN] * 4,
    ]
    logits = torch.full((len(rows), 5000), -INF, device=device)
    logits[:, -4:] = torch.tensor(rows, device=device)
    logits[5] = NAN
    found = kernels.best(logits)
    assert found.finite.tolist() == [True, True, False, False, False, False]
    assert (found.tokens[:2] - 4996).tolist() == [1, 2]
    assert torch.equal(found.most.isnan().cpu(), torch.tensor([False, False, True, False, False, True]))
    assert ((found.tokens >= 0) & (found.tokens < 5000)).all()
    samplings = [TokenSampling(seed=0, max_tokens=1, top_p=0.9)] * len(rows)
    drawn = _draw(logits, samplings, torch.full((len(rows),), 0.5, dtype=torch.float64, device=device))
    assert ((drawn >= 0) & (drawn < 5000)).all()
    assert drawn[0] in (4997, 4998)
    assert drawn[1] == 4998


def test_no_rows(device: torch.device) -> None:
    assert kernels.best(torch.zeros(0, 7, device=device)).tokens.shape == (0,)


# ------------------------------------------------------------------------------------------ drawing


@grid({"vocab": [257, 3, 5000], "spread": [0.0, 0.5, 4.0, 30.0]})
def test_draws_are_those_of_torch(vocab: int, spread: float, device: torch.device) -> None:
    samplings = _samplings()
    logits = torch.randn(len(samplings), vocab, device=device) * spread
    logits[:, 1] = -INF
    noise = _noise(len(samplings), device)
    ours, wanted = _draw(logits, samplings, noise), draw(logits.clone(), samplings, noise)
    probs = torch.softmax(logits.double() / torch.tensor([[s.temperature] for s in samplings], device=device), -1)
    # The places in the running sums may round apart, by less than any weight that matters.
    for row in (ours != wanted).nonzero().flatten().tolist():
        low, high = sorted((int(ours[row]), int(wanted[row])))
        assert float(probs[row, low + 1 : high].sum()) < 1e-6
    assert (ours != wanted).sum() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [152_064, 262_144, 300_007])
def test_large_vocabularies(vocab: int, device: torch.device) -> None:
    """Use a coarser unit of mass for more than 2**18 tokens."""
    samplings = [
        TokenSampling(seed=0, max_tokens=1, **given) for given in ({}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.9})
    ]
    logits, noise = torch.randn(3, vocab, device=device) * 3, _noise(3, device)
    assert torch.equal(_draw(logits, samplings, noise), draw(logits.clone(), samplings, noise))


def test_ties_are_kept_together(device: torch.device) -> None:
    """Draw, in bfloat16's few values, only tokens whose weight the definition keeps, and any of several ties."""
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0], device=device).expand(12, -1).contiguous()
    noise = (torch.arange(12, dtype=torch.float64, device=device) + 0.5) / 12
    for given in ({"top_k": 2}, {"top_p": 0.6}):
        seen = _draw(logits, [TokenSampling(seed=0, max_tokens=1, **given)] * 12, noise).bincount(minlength=5)
        assert seen[:4].min() > 1
        assert seen[4] == 0
    samplings = _samplings()
    coarse = (torch.randn(len(samplings), 3000, device=device) * 2).bfloat16().float()
    noise = _noise(len(samplings), device)
    assert (_draw(coarse, samplings, noise) != draw(coarse.clone(), samplings, noise)).sum() <= 1


def test_more_weights_near_the_floor_than_are_gathered(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = [sampling for sampling in _samplings() if 1 < sampling.top_k <= 300 or sampling.top_p < 1]
    logits, noise = torch.randn(len(samplings), 6000, device=device) * 0.2, _noise(len(samplings), device)
    gathered = _draw(logits, samplings, noise)
    monkeypatch.setattr(kernels, "KEPT", 100)
    assert torch.equal(_draw(logits, samplings, noise), gathered)


def test_noise_at_its_ends(device: torch.device) -> None:
    logits = torch.zeros(2, 1000, device=device)
    logits[:, [0, 999]] = -INF
    noise = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64, device=device)
    assert _draw(logits, [TokenSampling(seed=0, max_tokens=1)] * 2, noise).tolist() == [1, 998]


def test_a_row_is_the_same_alone_and_among_others(device: torch.device) -> None:
    samplings = _samplings()
    logits, noise = torch.randn(len(samplings), 5000, device=device) * 2, _noise(len(samplings), device)
    together = _draw(logits, samplings, noise)
    for row in range(0, len(samplings), 3):
        alone = _draw(logits[row : row + 1], samplings[row : row + 1], noise[row : row + 1])
        assert alone[0] == together[row]


def test_rows_that_are_not_drawn_stay_as_they_are(device: torch.device) -> None:
    logits = torch.randn(6, 300, device=device)
    logits[2] = NAN
    samplings = [TokenSampling(seed=0, max_tokens=1, top_p=0.8), TokenSampling(seed=0, max_tokens=1)]
    noise = torch.tensor([0.2, 0.9], dtype=torch.float64, device=device)
    mine, found = logits.clone(), kernels.best(logits)
    tokens = found.tokens.clone()
    kernels.draw(mine, found.most, _table(samplings, noise, [4, 1]), tokens, True)
    assert torch.equal(tokens[[4, 1]], draw(logits[[4, 1]], samplings, noise))
    others = [0, 2, 3, 5]
    assert torch.equal(tokens[others], found.tokens[others])
    assert torch.equal(mine[others].nan_to_num(7.0), logits[others].nan_to_num(7.0))


def test_frequencies_follow_the_distribution(device: torch.device) -> None:
    """Give each token its share of the draws with evenly spread noise, but for one at either end of its range."""
    steps, count = torch.linspace(0, 3, 16, device=device), 12
    noise = (torch.arange(count, dtype=torch.float64, device=device) + 0.5) / count
    for given, kept in (({}, 16), ({"top_k": 5, "min_p": 0.01}, 5)):
        rows = steps.expand(count, -1).contiguous()
        seen = _draw(rows, [TokenSampling(seed=0, max_tokens=1, **given)] * count, noise).bincount(minlength=16)
        probs = steps.softmax(0).where(torch.arange(16, device=device) >= 16 - kept, 0.0)
        assert seen[: 16 - kept].sum() == 0
        assert (seen - probs / probs.sum() * count).abs().max() <= 1.0


def test_a_table_without_filters_needs_no_search(device: torch.device) -> None:
    logits, noise = torch.randn(4, 5000, device=device), _noise(4, device)
    samplings = [TokenSampling(seed=0, max_tokens=1, min_p=0.1)] * 4
    mine, found = logits.clone(), kernels.best(logits)
    kernels.draw(mine, found.most, _table(samplings, noise, range(4)), found.tokens, False)
    assert torch.equal(found.tokens, draw(logits, samplings, noise))


def test_the_cases_run(device: torch.device) -> None:
    for case in kernels.cases(device):
        case.run()
        assert case.bytes > 0
