"""Sampling: each parameter's effect, the distribution, and that a row is as it would be alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ferrule.interfaces.sampler import LogitsProcessor, SampleBatch, Sampled, SampleRow
from ferrule.types import TokenSampling
from ferrule_plugins.sampler import draw as drawing
from ferrule_plugins.sampler.default import DefaultSampler
from ferrule_plugins.sampler.noise import uniform

VOCAB = 16


class Upward(LogitsProcessor):
    """Adds `by` to the token after the newest one."""

    def __init__(self, **kwargs: Any) -> None:
        if set(kwargs) != {"by"}:
            raise ValueError("only 'by'")
        self.by = kwargs["by"]

    def apply(self, known_ids: Sequence[int], num_prompt: int, logits: torch.Tensor) -> torch.Tensor:
        if self.by == "crash":
            raise RuntimeError("secret path")
        if self.by == "shape":
            return logits[:3]
        logits[(known_ids[-1] + 1) % len(logits)] += self.by
        return logits


class Plugins:
    def names(self, kind: str) -> tuple[str, ...]:
        return ("upward",)

    def load(self, kind: str, name: str) -> Any:
        return {("logits_processor", "upward"): Upward}[kind, name]

    def origin(self, kind: str, name: str) -> str:
        return "tests"


def _sampling(**changes: Any) -> TokenSampling:
    return TokenSampling(**{"seed": 0, "max_tokens": 100, **changes})


def _sample(
    logits: torch.Tensor, samplings: Sequence[TokenSampling], history: Sequence[int] = (), **row: Any
) -> Sampled:
    """One row per parameters; all have the same `history`, of which `num_prompt` ids (default: all) are the prompt."""
    ids = torch.zeros(len(samplings), max(64, len(history) + 1), dtype=torch.int32)
    ids[:, : len(history)] = torch.tensor(history, dtype=torch.int32)
    place = {"num_prompt": len(history), "position": len(history), **row}
    rows = [SampleRow(slot=n, sampling=s, **place) for n, s in enumerate(samplings)]
    wide = logits.expand(len(rows), -1) if logits.dim() == 1 else logits
    return DefaultSampler(Plugins()).sample(wide.clone(), SampleBatch(rows, ids))


def _one(logits: torch.Tensor, history: Sequence[int] = (), *, prompt: int | None = None, **changes: Any) -> int:
    row = {} if prompt is None else {"num_prompt": prompt}
    return int(_sample(logits, [_sampling(**{"temperature": 0.0, **changes})], history, **row).tokens[0])


def _draws(logits: torch.Tensor, count: int = 4000, **changes: Any) -> torch.Tensor:
    """How often each token is drawn over as many seeds, [vocab]."""
    samplings = [_sampling(seed=seed, **changes) for seed in range(count)]
    return torch.bincount(_sample(logits, samplings).tokens, minlength=logits.shape[-1]).double()


def _chi_square(seen: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs.double() * seen.sum()
    inside = expected > 0
    assert not seen[~inside].any()
    return float(((seen - expected)[inside] ** 2 / expected[inside]).sum())


STEPS = torch.linspace(0, 3, VOCAB)  # the last token is the most likely


# ------------------------------------------------------------------------------------------ distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    seen = _draws(STEPS, temperature=temperature)
    assert _chi_square(seen, torch.softmax(STEPS / temperature, 0)) < 37.7  # 15 degrees of freedom, p = 0.001


def test_top_k_keeps_the_k_likeliest() -> None:
    seen = _draws(STEPS, top_k=4)
    kept = torch.softmax(STEPS, 0).where(torch.arange(VOCAB) >= VOCAB - 4, 0.0)
    assert _chi_square(seen, kept / kept.sum()) < 16.3


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    for top_p, size in ((0.39, 1), (0.41, 2), (0.7001, 3), (0.86, 4), (0.999, 5)):
        kept = probs.where(torch.arange(5) < size, 0.0)
        assert _chi_square(_draws(probs.log(), top_p=top_p), kept / kept.sum()) < 18.5


def test_min_p_is_relative_to_the_likeliest() -> None:
    probs = torch.tensor([0.5, 0.3, 0.12, 0.08])
    kept = torch.tensor([0.5, 0.3, 0.0, 0.0])
    assert _chi_square(_draws(probs.log(), min_p=0.5), kept / kept.sum()) < 10.9


def test_top_p_counts_what_top_k_left() -> None:
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    kept = torch.tensor([0.4, 0.0, 0.0, 0.0])
    assert _chi_square(_draws(probs.log(), top_k=2, top_p=0.55), kept / kept.sum()) == 0  # 0.4 / 0.7 reaches 0.55


def test_a_flat_distribution_needs_more_than_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "CANDIDATES", 16)  # asked for in three rounds
    flat = torch.linspace(0, 0.1, 3000)
    seen = _draws(flat, count=3000, top_p=0.9)
    probs = torch.softmax(flat.double(), 0).flip(0).cumsum(0)
    kept = int((probs < 0.9).sum()) + 1
    assert not seen[: len(flat) - kept].any()
    assert seen[len(flat) - kept :].count_nonzero() > kept * 0.5


def test_ties_at_the_edge_are_kept_together() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    for changes in ({"top_k": 2}, {"top_p": 0.6}):
        seen = _draws(logits, **changes)
        assert seen[1:4].min() > 0
        assert seen[4] == 0


def test_temperature_that_is_tiny_is_greedy() -> None:
    assert (_draws(STEPS, count=50, temperature=1e-6).argmax(), _draws(STEPS, count=50, temperature=0.01).max()) == (
        VOCAB - 1,
        50,
    )


def test_noise_is_uniform_and_unrelated() -> None:
    seeds = [seed for seed in range(300) for _ in range(100)]
    noise = uniform(seeds, list(range(100)) * 300).reshape(300, 100)
    assert noise.min() >= 0
    assert noise.max() < 1
    counts = np.histogram(noise, bins=20, range=(0, 1))[0]
    assert ((counts - 1500.0) ** 2 / 1500).sum() < 43.8  # 19 degrees of freedom
    for related in (noise[1:].ravel(), noise[:-1, :].ravel()), (noise[:, 1:].ravel(), noise[:, :-1].ravel()):
        assert abs(np.corrcoef(*related)[0, 1]) < 0.03
    assert uniform([-1], [5])[0] == uniform([2**64 - 1], [5])[0]
    assert len(set(uniform([0, 1, 2**63, -(2**63) + 1], [0] * 4).tolist())) == 4


# ------------------------------------------------------------------------------------------- independence


SHAPES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 40},
    {"min_p": 0.05},
    {"top_k": 300, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 1.7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"logit_bias": ((3, 4.0),), "allowed_token_ids": (1, 3, 5, 7), "top_p": 0.99},
    {"top_p": 0.9999, "temperature": 5.0},
    {"min_tokens": 50, "stop_token_ids": (0, 1), "bad_words": ((2, 3), (4,))},
]


@pytest.mark.parametrize("vocab", [100, 2003, 50_257])
def test_a_rows_token_is_the_same_in_any_batch(vocab: int) -> None:
    torch.manual_seed(0)
    samplings = [_sampling(seed=17 * n, **shape) for n, shape in enumerate(SHAPES * 2)]
    logits = (torch.randn(len(samplings), vocab) * 4).bfloat16().float()  # as coarse as a model's: many ties
    history = torch.randint(0, 90, (20,)).tolist()
    together = _sample(logits, samplings, history, num_prompt=10).tokens
    order = torch.randperm(len(samplings))
    shuffled = _sample(logits[order], [samplings[n] for n in order.tolist()], history, num_prompt=10).tokens
    assert torch.equal(shuffled, together[order])
    for row, sampling in enumerate(samplings):
        assert _sample(logits[row : row + 1], [sampling], history, num_prompt=10).tokens[0] == together[row]


def test_rows_are_worked_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = [_sampling(seed=n, top_p=0.9) for n in range(9)]
    logits = torch.randn(9, 50)
    whole = _sample(logits, samplings).tokens
    monkeypatch.setattr(drawing, "ELEMENTS", 120)
    assert torch.equal(_sample(logits, samplings).tokens, whole)


def test_seed_and_position_decide() -> None:
    flat = torch.zeros(1000)
    tokens = {_one(flat, [0] * n, temperature=1.0, seed=seed) for n in range(5) for seed in range(5)}
    assert len(tokens) > 20
    assert len({_one(flat, [n] * 3, temperature=1.0, seed=4) for n in range(5)}) == 1


# ---------------------------------------------------------------------------------------------- parameters


def test_greedy_takes_the_first_of_equals() -> None:
    assert _one(torch.tensor([0.0, 5.0, 5.0, 1.0])) == 1


def test_presence_penalty_counts_once_and_frequency_each_time() -> None:
    logits = torch.tensor([3.0, 2.6, 2.2, 0.0])
    output = [0, 1, 1]
    assert _one(logits, output, prompt=0) == 0
    assert _one(logits, output, prompt=0, presence_penalty=0.9) == 2
    assert _one(logits, output, prompt=0, frequency_penalty=0.35) == 0
    assert _one(logits, [0, 0, 0, 1], prompt=0, frequency_penalty=0.35) == 1
    assert _one(logits, output, prompt=3, presence_penalty=0.9) == 0  # the prompt does not count


def test_penalties_equal_their_definition() -> None:
    torch.manual_seed(2)
    logits, history = torch.randn(VOCAB), [1, 2, 2, 9, 9, 9, 4]
    expected = logits.clone()
    for token in set(history):
        expected[token] = expected[token] / 1.4 if expected[token] > 0 else expected[token] * 1.4
    for token in set(history[3:]):
        expected[token] -= 0.3 * history[3:].count(token) + 0.2
    changed = logits.expand(2, -1).clone()
    ids = torch.tensor([history, history], dtype=torch.int32)
    penalised = _sampling(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2)
    rows = [SampleRow(0, _sampling(temperature=0.0), 3, 7), SampleRow(1, penalised, 3, 7)]
    sampler = DefaultSampler(Plugins())
    for _ in range(2):  # the second time finds the counts at zero again
        changed = logits.expand(2, -1).clone()
        sampler.sample(changed, SampleBatch(rows, ids))
        torch.testing.assert_close(changed[1], expected)
        assert torch.equal(changed[0], logits)


def test_repetition_penalty_counts_the_prompt() -> None:
    logits = torch.tensor([2.0, 1.8, -1.0])
    assert _one(logits, [0], repetition_penalty=1.5) == 1
    assert _one(torch.tensor([-1.0, -1.2]), [0], repetition_penalty=1.5) == 1


def test_logit_bias() -> None:
    assert _one(STEPS, logit_bias=((2, 10.0),)) == 2
    assert _one(STEPS, logit_bias=((VOCAB - 1, -10.0),)) == VOCAB - 2


def test_allowed_token_ids() -> None:
    assert _one(STEPS, allowed_token_ids=(3, 7, 1)) == 7
    seen = _draws(STEPS, count=200, allowed_token_ids=(3, 7))
    assert seen[3] + seen[7] == 200


def test_min_tokens_bans_stop_tokens_until_then() -> None:
    banned = {"min_tokens": 2, "stop_token_ids": (VOCAB - 1,)}
    assert _one(STEPS, [5, 5], prompt=2, **banned) == VOCAB - 2
    assert _one(STEPS, [5, 5, 5], prompt=2, **banned) == VOCAB - 2
    assert _one(STEPS, [5, 5, 5, 5], prompt=2, **banned) == VOCAB - 1


def test_bad_words_ban_the_last_token_where_the_rest_was_generated() -> None:
    words = {"bad_words": ((4, VOCAB - 1), (VOCAB - 2,))}
    assert _one(STEPS, [9, 4], prompt=1, **words) == VOCAB - 3
    assert _one(STEPS, [4, 9], prompt=1, **words) == VOCAB - 1
    assert _one(STEPS, [9, 4], prompt=2, **words) == VOCAB - 1  # the prompt is not what was generated


def test_grammar_mask() -> None:
    mask = int("0000000000100100", 2).to_bytes(2, "little")
    assert _sample(STEPS, [_sampling(temperature=0.0)], mask=mask).tokens.tolist() == [5]
    short = _sample(STEPS, [_sampling(temperature=0.0)], mask=b"\xff")  # ids that the mask does not reach are banned
    assert short.tokens.tolist() == [7]


def test_logits_processors() -> None:
    assert _one(STEPS, [3], processors=(("upward", {"by": 50.0}),)) == 4
    assert _one(STEPS, [3], processors=(("upward", {"by": 50.0}),), logit_bias=((1, 90.0),)) == 1


@pytest.mark.parametrize(
    "how", [("upward", {"by": "crash"}), ("upward", {"by": "shape"}), ("upward", {}), ("none", {})]
)
def test_a_failing_processor_is_its_rows_error(how: tuple[str, dict[str, Any]]) -> None:
    sampled = _sample(STEPS, [_sampling(temperature=0.0), _sampling(temperature=0.0, processors=(how,))], [1])
    assert list(sampled.errors) == [1]
    assert "secret" not in sampled.errors[1]
    assert sampled.tokens[0] == VOCAB - 1


def test_what_a_slot_prepared_is_not_the_next_requests() -> None:
    sampler, history = DefaultSampler(Plugins()), torch.zeros(1, 8, dtype=torch.int32)
    for token in (3, 9):
        row = SampleRow(0, _sampling(temperature=0.0, logit_bias=((token, 50.0),)), 1, 1)
        assert int(sampler.sample(STEPS[None].clone(), SampleBatch([row], history)).tokens[0]) == token


# -------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite(value: float, temperature: float) -> None:
    logits = STEPS.expand(3, -1).clone()
    logits[1] = value
    samplings = [_sampling(temperature=temperature, seed=n, repetition_penalty=1.1, logprobs=1) for n in range(3)]
    sampled = _sample(logits, samplings, [1])
    assert sampled.finite.tolist() == [True, False, True]
    assert torch.equal(sampled.tokens[[0, 2]], _sample(STEPS, samplings, [1]).tokens[[0, 2]])
    assert 0 <= int(sampled.tokens[1]) < VOCAB


def test_one_nan_among_numbers_is_seen() -> None:
    logits = STEPS.clone()
    logits[2] = math.nan
    assert not _sample(logits, [_sampling()]).finite.any()


def test_minus_infinity_is_a_token_that_cannot_be() -> None:
    logits = STEPS.clone()
    logits[8:] = -math.inf
    assert _sample(logits, [_sampling(seed=n) for n in range(99)]).tokens.max() < 8


def test_nothing_allowed_is_an_error_of_that_row() -> None:
    sampled = _sample(
        STEPS, [_sampling(temperature=0.0), _sampling(allowed_token_ids=(1,), bad_words=((1,),))], [3], num_prompt=1
    )
    assert sampled.finite.tolist() == [True, False]


def test_logprobs_are_of_the_raw_logits_and_only_for_who_asks() -> None:
    samplings = [_sampling(), _sampling(logprobs=2, logit_bias=((0, 9.0),)), _sampling(logprobs=0)]
    sampled = _sample(STEPS, samplings)
    assert sampled.logprobs is not None
    torch.testing.assert_close(sampled.logprobs, STEPS.log_softmax(0).expand(2, -1))
    assert _sample(STEPS, [_sampling()]).logprobs is None
