"""Every method with every wish of a request: outputs are those without guesses.

Each method meets each option of sampling and of the output, and each of these the other; the slow run takes all three.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule.assembly.vocabulary import open_backend, open_tokenizer
from ferrule.forms import GrammarSpec, Regex
from ferrule.interfaces.speculator import DraftSteps, KnownRows
from ferrule.types import CompiledGrammar, FinishReason, ThoughtLimit
from ferrule_plugins.speculator.ngram import Ngram
from ferrule_testkit.harness import Harness, Output

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(20, 40)), [31], [41, 42] * 9, [51, 52, 53, 54]]
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 4.0, "suffix_decoding_min_token_prob": 0.0},
    "draft_model": {"method": "draft_model", "least_certainty": 0},
}
FEW = tuple(range(60, 68))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "allowed_token_ids": FEW}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "seed": {**SAMPLED, "seed": 7},
    "filters": {**SAMPLED, "seed": 8, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    "penalties": {**SAMPLED, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bad words": {**SAMPLED, "bad_words": ((60,), (61, 62), (63, 64, 65))},
    "bias": {**SAMPLED, "logit_bias": ((60, 2.0), (61, -50.0))},
    "processor": {
        **SAMPLED,
        "processors": (("python_function", {"function": "tests.unit.runner.test_speculation:even"}),),
    },
    "stop tokens": {**SAMPLED, "stop_token_ids": (60, 61), "min_tokens": 6},
}
OUTPUT: dict[str, dict[str, Any]] = {
    "text": {"logprobs": None},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"logprobs": 0, "prompt_logprobs": 1},
    "regex": {"grammar": "([a-f]{3}[0-9]{2}){1,7}"},
    "thoughts": {
        "thoughts": ThoughtLimit(tokens=9, inside=True, opens=("<t>",), closes=("</t>",), end_ids=(62, 63, 64))
    },
    "preempted": {"num_blocks": 26, "depth": 2},
}


def even(known: list[int], logits: Any) -> Any:
    """Make every other token likelier where an even number of tokens is known."""
    logits[len(known) % 2 :: 2] += 3
    return logits


class Both:
    """A model with one method, and without."""

    def __init__(self, folder: Path, method: str, plain: Harness) -> None:
        own = {"model": str(folder)} if method == "draft_model" else {}
        speculative = {"num_speculative_tokens": 4, "adaptive": False, **METHODS[method], **own}
        self.harness = Harness(folder, dtype="float32", speculative=speculative)
        self.plain = plain
        self.drafts = self.accepted = 0

    def run(self, harness: Harness, **asked: Any) -> list[Output]:
        limits = {name: asked.pop(name) for name in ("num_blocks", "depth") if name in asked}
        regex = asked.pop("grammar", None)
        if regex is not None:
            tokenizer = partial(open_tokenizer, harness.config, harness.plugins, Path(harness.config.model.tokenizer))
            vocab_size = harness.info.vocab_size
            backend = open_backend(harness.config, harness.plugins, tokenizer, vocab_size, "xgrammar")
            data = backend.compile(GrammarSpec(form=Regex(regex)))
            asked["grammars"] = [CompiledGrammar(backend="xgrammar", digest=data, data=data)] * len(PROMPTS)
            asked["stop_token_ids"] = (*asked.get("stop_token_ids", ()), *backend.vocabulary.stop_ids)
            asked.pop("allowed_token_ids", None)
        engine = harness.engine(**limits)
        found = engine.run(PROMPTS, max_tokens=20, **asked)
        stats = engine.scheduler.stats()
        self.drafts, self.accepted = self.drafts + stats.drafts, self.accepted + stats.accepted_tokens
        return found


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Iterator[Harness]:
    with Harness(tiny_llama, dtype="float32") as made:
        yield made


@pytest.fixture(scope="module")
def made(tiny_llama: Path, plain: Harness) -> Iterator[dict[str, Both]]:
    """Keep what the tests have made, by method."""
    found: dict[str, Both] = {}
    yield found
    for both in found.values():
        both.harness.close()


@pytest.fixture
def both(request: pytest.FixtureRequest, tiny_llama: Path, plain: Harness, made: dict[str, Both]) -> Both:
    method = request.param
    if method not in made:
        made[method] = Both(tiny_llama, method, plain)
    return made[method]


def cases() -> Iterator[Any]:
    """Yield all methods with all pairs of options. Each method has a part of the pairs in the quick run."""
    for i, (sampling, wishes) in enumerate(SAMPLING.items()):
        for j, (output, asked) in enumerate(OUTPUT.items()):
            for k, method in enumerate(METHODS):
                marks = () if (i + j) % len(METHODS) == k else pytest.mark.slow
                yield pytest.param(method, {**wishes, **asked}, id=f"{method}-{sampling}-{output}", marks=marks)


@pytest.mark.advisory("CVE-2026-44223")
@pytest.mark.parametrize(("both", "asked"), tuple(cases()), indirect=["both"])
def test_outputs_are_those_without_guesses(both: Both, asked: dict[str, Any]) -> None:
    wanted, found = both.run(both.plain, **asked), both.run(both.harness, **asked)
    for output, alone in zip(found, wanted, strict=True):
        assert (output.token_ids, output.finish, output.error) == (alone.token_ids, alone.finish, alone.error)
        assert [entry.logprob for entry in output.logprobs] == pytest.approx(
            [entry.logprob for entry in alone.logprobs], abs=1e-4
        )
        assert len(output.logprobs) == len(alone.logprobs)
        assert len(output.prompt_logprobs) == len(alone.prompt_logprobs)
    both.harness.executor.call("check", ())


@pytest.mark.parametrize("both", METHODS, indirect=True)
def test_guesses_are_made_and_counted(both: Both) -> None:
    found = both.run(both.harness, **SAMPLED, seed=3)
    assert both.drafts > 10
    assert both.accepted > 2
    assert {output.finish for output in found} == {FinishReason.LENGTH}


class Rogue(Ngram):
    """A speculator whose guesses are no ids."""

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        wild = torch.tensor([5, 1 << 40, -7, 320, -(1 << 60), 6])
        return wild.roll(int(rows.lengths[0])).expand(len(rows.slots), -1)


def test_ids_out_of_range_disturb_nothing(tiny_llama: Path, plain: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ngram, "propose", Rogue.propose)
    with Harness(tiny_llama, dtype="float32", speculative={"method": "ngram", "adaptive": False}) as harness:
        engine = harness.engine(depth=2)
        found = engine.run(PROMPTS, max_tokens=24)
        harness.executor.call("check", ())
    wanted = plain.engine().run(PROMPTS, max_tokens=24)
    assert [output.token_ids for output in found] == [output.token_ids for output in wanted]
    assert engine.stats.drafts > 10


def test_typical_acceptance_accepts_more(tiny_llama: Path) -> None:
    """Draw with few tokens to choose from, so that guesses by chance are often likely enough."""
    rates: dict[str, Any] = {}
    for method in ("rejection_sampler", "typical_acceptance_sampler"):
        given = {**METHODS["ngram"], "acceptance_method": method, "adaptive": False, "posterior_threshold": 0.2}
        with Harness(tiny_llama, dtype="float32", speculative=given) as harness:
            engine = harness.engine()
            engine.run(PROMPTS * 3, max_tokens=60, **SAMPLED, seed=3)
            rates[method] = engine.stats.accepted_tokens / engine.stats.draft_tokens
            greedy = [output.token_ids for output in harness.engine().run(PROMPTS, max_tokens=16)]
            rates[f"{method} greedy"] = greedy
    assert rates["rejection_sampler greedy"] == rates["typical_acceptance_sampler greedy"]
    assert rates["typical_acceptance_sampler"] > 1.5 * rates["rejection_sampler"] > 0
