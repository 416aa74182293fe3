"""What `--logprobs-mode` tells of a token, by formula: raw or as it was drawn, log-probabilities or logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ferrule.interfaces.sampler import LogprobsMode, SampleBatch, SampleRow
from ferrule.types import TokenSampling
from ferrule_plugins.sampler import chooser
from ferrule_plugins.sampler.default import DefaultSampler
from ferrule_plugins.sampler.draw import _filter, processed
from ferrule_testkit.kits.sampler import OnePlugin

VOCAB = 12
HISTORY = [7, 3, 3, 5]  # the first is the prompt
MASK = 0b0000_1111_1111_1111.to_bytes(2, "little")

SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0.6, "logit_bias": ((2, 3.0), (9, -4.0))},
    {"temperature": 1.4, "top_k": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "top_p": 0.7, "logit_bias": ((2, 3.0),)},
    {"temperature": 1.2, "min_p": 0.3, "allowed_token_ids": (1, 2, 3, 5, 8, 9)},
    {"temperature": 1.2, "top_k": 5, "top_p": 0.8, "min_p": 0.1, "bad_words": ((5, 2), (1,))},
    {"min_tokens": 9, "stop_token_ids": (4,), "top_k": 1},
]


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def _chooser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(chooser, "chooser", lambda device: chooser.TorchChooser())


def drawn_from(logits: list[float], given: dict[str, Any]) -> list[float]:
    """Return the logits after all that a request asks for, in plain Python."""
    changed, after = list(logits), HISTORY[1:]
    allowed = given.get("allowed_token_ids", range(VOCAB))
    banned = {t for t in range(VOCAB) if t not in allowed}
    banned |= {
        word[-1] for word in given.get("bad_words", ()) if list(word[:-1]) == after[len(after) - len(word) + 1 :]
    }
    banned |= set(given.get("stop_token_ids", ())) if given.get("min_tokens") else set()
    for token, bias in given.get("logit_bias", ()):
        changed[token] += bias
    repetition = given.get("repetition_penalty", 1.0)
    for token in range(VOCAB):
        if token in HISTORY:
            changed[token] *= repetition if changed[token] < 0 else 1 / repetition
        changed[token] -= given.get("frequency_penalty", 0.0) * after.count(token)
        changed[token] -= given.get("presence_penalty", 0.0) * (token in after)
        changed[token] = -math.inf if token in banned else changed[token]
    temperature = given.get("temperature", 1.0)
    if not temperature:
        return changed
    scaled = [value / temperature for value in changed]
    total = sum(map(math.exp, scaled))
    order = sorted(range(VOCAB), key=lambda token: -scaled[token])
    probs = [math.exp(value) / total for value in scaled]
    kept = [token for token in order if probs[token] >= given.get("min_p", 0.0) * probs[order[0]]]
    kept = kept[: given.get("top_k") or VOCAB]
    left, nucleus = sum(probs[token] for token in kept), list[int]()
    while kept and sum(probs[token] for token in nucleus) < given.get("top_p", 2.0) * left:
        nucleus.append(kept.pop(0))
    return [value if token in nucleus else -math.inf for token, value in enumerate(scaled)]


def normalised(logits: list[float]) -> list[float]:
    total = math.log(sum(map(math.exp, logits)))
    return [value - total for value in logits]


def _sample(logits: torch.Tensor, samplings: list[TokenSampling], mode: LogprobsMode) -> list[torch.Tensor]:
    rows = [SampleRow(n, one, 1, len(HISTORY), MASK if n % 2 else None) for n, one in enumerate(samplings)]
    ids = torch.zeros(len(rows), 16, dtype=torch.int32)
    ids[:, : len(HISTORY)] = torch.tensor(HISTORY, dtype=torch.int32)
    sampled = DefaultSampler(OnePlugin()).sample(logits.clone(), SampleBatch(rows, ids, logprobs_mode=mode))
    assert sampled.finite.all()
    assert sampled.ranked is not None
    return [sampled.tokens, *sampled.ranked]


@pytest.mark.parametrize("mode", LogprobsMode)
@pytest.mark.parametrize("every", [True, False], ids=["all ask", "some ask"])
def test_values_by_formula(mode: LogprobsMode, every: bool) -> None:
    logits = torch.randn(len(SHAPES), VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    asking = [row for row in range(len(SHAPES)) if every or row % 3]
    samplings = [
        TokenSampling(seed=row, max_tokens=20, logprobs=-1 if row in asking else None, **given)
        for row, given in enumerate(SHAPES)
    ]
    drawn, tokens, own, ranks, values, ids = _sample(logits, samplings, mode)
    assert tokens.tolist() == drawn[asking].tolist()
    for place, row in enumerate(asking):
        raw = logits[row].tolist()
        wanted = drawn_from(raw, SHAPES[row]) if mode.processed else raw
        wanted = normalised(wanted) if mode.normalised else wanted
        token = int(tokens[place])
        assert wanted[token] > -math.inf
        assert float(own[place]) == pytest.approx(wanted[token], abs=1e-5)
        assert int(ranks[place]) == 1 + sum(value > wanted[token] + 1e-6 for value in wanted)
        assert values[place].tolist() == pytest.approx(sorted(wanted, reverse=True), abs=1e-5)
        assert {int(t): v for t, v in zip(ids[place], values[place].tolist(), strict=True)} == pytest.approx(
            dict(enumerate(wanted)), abs=1e-5
        )


@pytest.mark.parametrize("mode", LogprobsMode)
def test_tokens_are_the_same_in_each_mode(mode: LogprobsMode) -> None:
    logits = torch.randn(len(SHAPES), VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    samplings = [TokenSampling(seed=row, max_tokens=20, logprobs=1, **given) for row, given in enumerate(SHAPES)]
    usual = _sample(logits, samplings, LogprobsMode.RAW_LOGPROBS)[0]
    assert _sample(logits, samplings, mode)[0].tolist() == usual.tolist()


def test_what_is_told_is_what_draws_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply the filter of `draw`, over random rows; in pieces, too."""
    made = torch.Generator().manual_seed(6)
    draws = torch.rand(200, 4, generator=made, dtype=torch.float64)
    shapes = torch.stack(
        [(draws[:, 0] * 12).floor(), 1 - draws[:, 1] / 2, 0.2 + draws[:, 2], draws[:, 3].where(draws[:, 3] < 0.4, 0)], 1
    )
    logits = torch.randn(200, 50, generator=made) * 3
    samplings = [
        TokenSampling(seed=0, max_tokens=1, top_k=int(k), top_p=p, temperature=t, min_p=m)
        for k, p, t, m in shapes.tolist()
    ]
    scaled = logits / shapes[:, 2:3].float()
    kept = _filter(scaled.softmax(-1), samplings) > 0
    for elements in (1 << 22, 150):
        monkeypatch.setattr("ferrule_plugins.sampler.draw.ELEMENTS", elements)
        told = processed(logits, shapes, logits.argmax(-1))
        assert torch.equal(told > -math.inf, kept)
        assert torch.equal(told.where(kept, 0), scaled.where(kept, 0))


def test_the_token_that_was_drawn_is_never_left_out() -> None:
    """Keep the token even if a kernel rounds otherwise than torch where a filter ends."""
    told = processed(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1, 1, 1, 0]]).double(), torch.tensor([1]))
    assert told.tolist() == [[3.0, 2.0, -math.inf]]
