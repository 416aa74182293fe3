"""Typical acceptance: a guess holds where it is likely enough, by the numbers of --speculative-config."""

from __future__ import annotations

import pytest
import torch

from ferrule.interfaces.sampler import SampleBatch, SampleRow, TypicalAcceptance
from ferrule.types import TokenSampling
from ferrule_plugins.sampler.default import DefaultSampler
from ferrule_testkit.kits.sampler import OnePlugin

VOCAB = 50
ROWS = 400
BOUNDS = TypicalAcceptance(threshold=0.09, alpha=0.3)


def drawn(
    logits: torch.Tensor, guesses: torch.Tensor, typical: TypicalAcceptance | None, **sampling: object
) -> torch.Tensor:
    wishes = {"temperature": 1.0, "max_tokens": 9, **sampling}
    rows = [SampleRow(n % 8, TokenSampling(seed=n, **wishes), 1, 4) for n in range(len(logits))]  # type: ignore[arg-type]
    batch = SampleBatch(rows, torch.ones(8, 16, dtype=torch.int32), typical=typical)
    return DefaultSampler(OnePlugin()).verify(logits.clone(), batch, guesses).tokens


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def guesses() -> torch.Tensor:
    return torch.randint(-1, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (1.5, 8)])
def test_a_guess_holds_by_its_probability(
    logits: torch.Tensor, guesses: torch.Tensor, temperature: float, top_k: int
) -> None:
    plain = drawn(logits, guesses, None, temperature=temperature, top_k=top_k)
    found = drawn(logits, guesses, BOUNDS, temperature=temperature, top_k=top_k)
    scaled = logits.double() / temperature
    if top_k:
        least = scaled.topk(top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    chances = scaled.softmax(-1)
    entropy = -(chances * chances.clamp(min=1e-30).log()).sum(-1)
    bound = torch.minimum(torch.full((ROWS,), BOUNDS.threshold).double(), BOUNDS.alpha * torch.exp(-entropy))
    holds = (guesses >= 0) & (chances.gather(1, guesses.clamp(min=0)[:, None]).squeeze(1) > bound)
    assert torch.equal(found, torch.where(holds, guesses, plain))
    assert 10 < int(holds.sum()) < ROWS / 2
    assert int((found != plain).sum()) > 5


def test_greedy_rows_do_not_change(logits: torch.Tensor, guesses: torch.Tensor) -> None:
    assert torch.equal(drawn(logits, guesses, BOUNDS, temperature=0.0), logits.argmax(-1))


def test_a_token_that_is_not_allowed_does_not_hold(logits: torch.Tensor) -> None:
    guesses = logits.argmax(-1)
    allowed = tuple(range(0, VOCAB, 2))
    found = drawn(logits, guesses, BOUNDS, allowed_token_ids=allowed)
    assert not set(found.tolist()) - set(allowed)
    assert torch.equal(found[guesses % 2 == 0][:20], guesses[guesses % 2 == 0][:20])


def test_without_it_guesses_change_nothing(logits: torch.Tensor, guesses: torch.Tensor) -> None:
    assert torch.equal(drawn(logits, guesses, None), drawn(logits, torch.full_like(guesses, -1), None))
