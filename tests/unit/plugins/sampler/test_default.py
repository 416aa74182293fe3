"""The default sampler beyond its kit: ties, pieces, noise, processors and what an edge does to a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.sampler import LogitsProcessor, SampleBatch, Sampled, SampleRow
from ferrule.types import TokenSampling
from ferrule_plugins.sampler import chooser
from ferrule_plugins.sampler import draw as drawing
from ferrule_plugins.sampler.default import DefaultSampler
from ferrule_plugins.sampler.noise import uniform

VOCAB = 16


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def _chooser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cpu_kernels: Kernels) -> None:
    """Run everything below with the kernels and with torch."""
    kernels = Kernels() if request.param == "torch" else cpu_kernels
    make = chooser.chooser
    assert type(make(kernels)) is (chooser.TorchChooser if request.param == "torch" else chooser.CompiledChooser)
    monkeypatch.setattr(chooser, "chooser", lambda given: make(kernels))


class Upward(LogitsProcessor):
    """A processor that adds `by` to the token after the newest one."""

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

    def make(self, kind: str, name: str, *given: Any, **named: Any) -> Any:
        return self.load(kind, name)(*given, **named)

    def origin(self, kind: str, name: str) -> str:
        return "tests"

    def title(self, kind: str, name: str) -> str:
        return f"{kind}:{name} of tests"


def _sampling(**changes: Any) -> TokenSampling:
    return TokenSampling(**{"seed": 0, "max_tokens": 100, **changes})


def _sample(
    logits: torch.Tensor, samplings: Sequence[TokenSampling], history: Sequence[int] = (), **row: Any
) -> Sampled:
    """Sample one row for each of the parameters; all have the same `history`, of which `num_prompt` ids (default: all)
    are the prompt.
    """
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
    """Return how often each token is drawn over as many seeds, [vocab]."""
    samplings = [_sampling(seed=seed, **changes) for seed in range(count)]
    return torch.bincount(_sample(logits, samplings).tokens, minlength=logits.shape[-1]).double()


def _chi_square(seen: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs.double() * seen.sum()
    inside = expected > 0
    assert not seen[~inside].any()
    return float(((seen - expected)[inside] ** 2 / expected[inside]).sum())


STEPS = torch.linspace(0, 3, VOCAB)  # the last token is the most likely


# ------------------------------------------------------------------------------------------ distribution


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    for top_p, size in ((0.39, 1), (0.41, 2), (0.7001, 3), (0.86, 4), (0.999, 5)):
        kept = probs.where(torch.arange(5) < size, 0.0)
        assert _chi_square(_draws(probs.log(), top_p=top_p), kept / kept.sum()) < 18.5


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


def test_presence_penalty_counts_once_and_frequency_each_time() -> None:
    logits = torch.tensor([3.0, 2.6, 2.2, 0.0])
    output = [0, 1, 1]
    assert _one(logits, output, prompt=0) == 0
    assert _one(logits, output, prompt=0, presence_penalty=0.9) == 2
    assert _one(logits, output, prompt=0, frequency_penalty=0.35) == 0
    assert _one(logits, [0, 0, 0, 1], prompt=0, frequency_penalty=0.35) == 1
    assert _one(logits, output, prompt=3, presence_penalty=0.9) == 0  # the prompt does not count


@pytest.mark.advisory("CVE-2026-105922")
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


def test_ids_of_embedded_positions_count_for_nothing() -> None:
    """Ignore the history of a prompt that came as embeddings: it has no ids, and did not say token 0."""
    logits = torch.tensor([2.0, 1.8, -1.0])
    strong = _sampling(temperature=0.0, repetition_penalty=1.5)
    history = [0, 0, 0]

    def best(sampling: TokenSampling, known: Sequence[int] = history, **row: Any) -> int:
        return int(_sample(logits, [sampling], known, num_prompt=3, **row).tokens[0])

    assert best(strong) == 1
    assert best(strong, num_embedded=3) == 0
    assert best(strong, [*history, 0], num_embedded=3) == 1  # this one was generated
    assert best(_sampling(temperature=0.0, presence_penalty=1.0), [*history, 1], num_embedded=3) == 0
    mixed = [SampleRow(0, strong, 3, 3, num_embedded=3), SampleRow(1, strong, 3, 3)]
    wide, ids = logits.expand(2, -1).clone(), torch.zeros(2, 8, dtype=torch.int32)
    assert DefaultSampler(Plugins()).sample(wide, SampleBatch(mixed, ids)).tokens.tolist() == [0, 1]


def test_logits_processors_see_no_ids_of_embeddings() -> None:
    seen: list[tuple[list[int], int]] = []

    class Looks(Upward):
        def apply(self, known_ids: Sequence[int], num_prompt: int, logits: torch.Tensor) -> torch.Tensor:
            seen.append((list(known_ids), num_prompt))
            return logits

    class Found(Plugins):
        def load(self, kind: str, name: str) -> Any:
            return Looks

    rows = [SampleRow(0, _sampling(processors=(("looks", {"by": 1.0}),)), 2, 3, num_embedded=2)]
    DefaultSampler(Found()).sample(torch.randn(1, VOCAB), SampleBatch(rows, torch.tensor([[0, 0, 7, 0]])))
    assert seen == [([7], 0)]


def test_logits_processors() -> None:
    assert _one(STEPS, [3], processors=(("upward", {"by": 50.0}),)) == 4
    assert _one(STEPS, [3], processors=(("upward", {"by": 50.0}),), logit_bias=((1, 90.0),)) == 1


@pytest.mark.parametrize(
    "how", [("upward", {"by": "crash"}), ("upward", {"by": "shape"}), ("upward", {}), ("none", {})]
)
def test_a_failing_processor_is_its_rows_error(
    how: tuple[str, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    sampled = _sample(STEPS, [_sampling(temperature=0.0), _sampling(temperature=0.0, processors=(how,))], [1])
    assert list(sampled.errors) == [1]
    assert "secret" not in sampled.errors[1]
    assert sampled.tokens[0] == VOCAB - 1
    (fault,) = caplog.records
    assert fault.getMessage().startswith(f"plugin logits_processor:{how[0]} of tests raised in ")
    assert fault.exc_info is not None


def test_a_processor_gets_the_tokenizer_once() -> None:
    """Open the tokenizer only for processors that define `begin`."""
    opened, begun = [], []

    class Begins(Upward):
        def begin(self, tokenizer: Any) -> None:
            begun.append(tokenizer)

    class Both(Plugins):
        def load(self, kind: str, name: str) -> Any:
            return {"upward": Upward, "begins": Begins}[name]

    def tokenizer() -> Any:
        opened.append(1)
        return "the tokenizer"

    sampler, history = DefaultSampler(Both()), torch.zeros(1, 64, dtype=torch.int32)  # type: ignore[arg-type]
    for name, times in (("upward", 0), ("begins", 1)):
        sampling = _sampling(temperature=0.0, processors=((name, {"by": 1.0}),))
        for position in (1, 2):
            row = SampleRow(slot=0, sampling=sampling, num_prompt=1, position=position)
            assert not sampler.sample(STEPS[None], SampleBatch([row], history, tokenizer=tokenizer)).errors
        assert (len(opened), begun) == (times, ["the tokenizer"] * times)


# -------------------------------------------------------------------------------------------------- faults


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


@pytest.mark.advisory("CVE-2026-93989")
def test_bad_words_behind_the_last_logit_touch_nobody() -> None:
    """Ignore such ids: a tokenizer may know more ids than the model has logits."""
    torch.manual_seed(3)
    wide = torch.randn(3, VOCAB)
    words = tuple((token,) for token in (VOCAB, VOCAB + 1, 2 * VOCAB - 1, 2 * VOCAB, 1 << 31, 1 << 40)) + ((1, VOCAB),)
    plain, hostile = _sampling(temperature=0.0), _sampling(temperature=0.0, bad_words=words)
    alone, beside = wide.clone(), wide.clone()
    for logits, samplings in ((alone, [plain] * 3), (beside, [hostile, plain, hostile])):
        rows = [SampleRow(slot=n, sampling=sampling, num_prompt=1, position=1) for n, sampling in enumerate(samplings)]
        DefaultSampler(Plugins()).sample(logits, SampleBatch(rows, torch.ones(3, 8, dtype=torch.int32)))
    assert torch.equal(alone, beside)
