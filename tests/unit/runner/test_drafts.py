"""Guesses of the next tokens: what a request says, and how often a step is needed for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferrule.assembly.vocabulary import open_backend, open_tokenizer
from ferrule.execution import worker
from ferrule.forms import GrammarSpec, Regex
from ferrule.interfaces.platform import Transfers
from ferrule.interfaces.sampler import Sampled
from ferrule.interfaces.scheduler import GuessLimits
from ferrule.runner.draws import Draws
from ferrule.runner.model_runner import RunnerParts
from ferrule.runner.outcome import Outcome
from ferrule.types import Chunk, CompiledGrammar, FinishReason, StepPlan, ThoughtLimit
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Engine, Harness, Output
from tests.fakes.speculator import LuckySpeculator

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [21, 22, 23], [31, 32, 33, 34, 35], [41, 42], [51, 52, 53, 54]]


class Guessing(Harness):
    """A model, and a speculator that was told what it says without one."""

    def __init__(self, folder: Path) -> None:
        self.lucky = LuckySpeculator(vocab_size=200)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "RunnerParts", partial(RunnerParts, speculator=self.lucky))
            super().__init__(folder, dtype="float32")

    def engine(self, **limits: Any) -> Engine:
        self.lucky.restart()
        return super().engine(**{"guesses": GuessLimits(most=4, adaptive=False), **limits})

    def compare(
        self, limits: dict[str, Any], *, chance: float = 0.6, at_most: float = 0.8, **sampling: Any
    ) -> list[Output]:
        """Return outputs with guesses, which equal those without, computed in `at_most` so many rows."""
        self.lucky.texts = []
        wanted, before = self.engine(**limits).run(PROMPTS, **sampling), self.lucky.rows
        self.lucky.texts = [[*ids, *output.token_ids] for ids, output in zip(PROMPTS, wanted, strict=True)]
        self.lucky.chance = chance
        found, rows = self.engine(**limits).run(PROMPTS, **sampling), self.lucky.rows
        for output, alone in zip(found, wanted, strict=True):
            same = (output.token_ids, output.finish, output.error)
            assert same == (alone.token_ids, alone.finish, alone.error)
            numbers = [entry.logprob for entry in output.logprobs]
            assert numbers == pytest.approx([entry.logprob for entry in alone.logprobs], abs=1e-4)
            assert len(numbers) == len(output.token_ids) * (sampling.get("logprobs", 0) is not None)
            assert len(output.prompt_logprobs) == len(alone.prompt_logprobs)
        assert rows <= at_most * before
        self.executor.call("check")
        return found


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> Iterator[Guessing]:
    with Guessing(tiny_llama) as made:
        yield made


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guessing]:
    with Guessing(tiny_checkpoint("lfm2", tmp_path_factory.mktemp("lfm2"))) as made:
        yield made


SAMPLED = {"temperature": 1.0, "seed": 7}
MANNERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "logprobs": {**SAMPLED, "logprobs": 3, "prompt_logprobs": 1},
    "no logprobs": {**SAMPLED, "logprobs": None},
    "penalties": {**SAMPLED, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bad words": {**SAMPLED, "top_k": 4, "bad_words": tuple((n,) for n in range(0, 200, 3))},
    "stop tokens": {**SAMPLED, "top_k": 20, "stop_token_ids": tuple(range(0, 200, 9)), "min_tokens": 6},
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("manner", MANNERS)
def test_guesses_change_no_output(llama: Guessing, manner: str, depth: int) -> None:
    found = llama.compare({"depth": depth}, max_tokens=30, **MANNERS[manner])
    if manner == "stop tokens":
        assert FinishReason.STOP in {output.finish for output in found}


@pytest.mark.parametrize("depth", [1, 2])
def test_guesses_with_preemption_and_chunks(llama: Guessing, depth: int) -> None:
    limits = {"depth": depth, "num_blocks": 22, "max_num_batched_tokens": 12}
    found = llama.compare(limits, max_tokens=30, **SAMPLED)
    assert sum(output.num_preemptions for output in found) > 0


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_all_guesses_are_wrong_or_right(llama: Guessing, chance: float) -> None:
    """Say up to five tokens in a row if all are right, and one in each if all are wrong."""
    llama.compare({}, chance=chance, at_most=1 - chance / 2, max_tokens=40)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [26, 200])
def test_states_go_back_to_the_last_token_that_counted(hybrid: Guessing, depth: int, num_blocks: int) -> None:
    """Restore states, with preemption; the second turn begins with states that were saved while the first was
    guessed.
    """
    limits = {"depth": depth, "num_blocks": num_blocks}
    hybrid.compare(limits, max_tokens=30, **SAMPLED)
    text = hybrid.lucky.texts[0]
    engine = hybrid.engine(depth=depth)
    engine.run(PROMPTS[:1], max_tokens=30, **SAMPLED)
    (again,) = engine.run([[*text, 3]], max_tokens=8)
    hybrid.lucky.texts = []
    (fresh,) = hybrid.engine(prefix_caching=False).run([[*text, 3]], max_tokens=8)
    assert again.token_ids == fresh.token_ids
    assert again.cached >= 20


def test_a_second_turn_finds_the_first(llama: Guessing) -> None:
    llama.compare({}, max_tokens=30)
    text = llama.lucky.texts[0]
    engine = llama.engine()
    engine.run(PROMPTS[:1], max_tokens=30)
    (again,) = engine.run([[*text, 3]], max_tokens=8)
    llama.lucky.texts = []
    (fresh,) = llama.engine(prefix_caching=False).run([[*text, 3]], max_tokens=8)
    assert again.token_ids == fresh.token_ids
    assert again.cached == (len(text) - 1) // 4 * 4


@pytest.mark.parametrize("depth", [1, 2])
def test_constraints_go_back_with_the_guesses(llama: Guessing, depth: int) -> None:
    tokenizer = partial(open_tokenizer, llama.config, llama.plugins, Path(llama.config.model.tokenizer))
    for name in ("guidance", "xgrammar"):
        backend = open_backend(llama.config, llama.plugins, tokenizer, llama.info.vocab_size, name)
        data = backend.compile(GrammarSpec(form=Regex("([a-f]{3}[0-9]{2}){1,7}")))
        grammar = CompiledGrammar(backend=name, digest=data, data=data)
        given = {"grammars": [grammar] * 3, "stop_token_ids": backend.vocabulary.stop_ids, **SAMPLED}
        found = llama.compare({"depth": depth}, max_tokens=40, **given)
        assert FinishReason.STOP in {output.finish for output in found[:3]}


def test_a_limit_on_thoughts_goes_back_with_the_guesses(llama: Guessing) -> None:
    limit = ThoughtLimit(tokens=9, inside=True, opens=("<t>",), closes=("</t>",), end_ids=(60, 61, 62))
    found = llama.compare({}, max_tokens=30, thoughts=limit, **SAMPLED)
    assert [output.token_ids[9:12] for output in found] == [[60, 61, 62]] * len(PROMPTS)


# ------------------------------------------------------------------------------------------- without a model


def chunk(slot: int, *guesses: int, start: int = 4) -> Chunk:
    drafts = len(guesses)
    return Chunk(
        slot=slot, id="", epoch=0, start=start, count=1 + drafts, ends="sample", new_ids=guesses, drafts=drafts
    )


def test_lengths_are_known_where_the_tokens_are() -> None:
    draws = Draws.of([chunk(0, 7, 8), chunk(1), chunk(2, 9)], [0, 1, 2])
    assert (draws.rows, draws.ahead) == ([0, 0, 0, 1, 2, 2], [0, 1, 2, 0, 0, 1])
    positions = np.array([5, 6, 7, 5, 5, 6])
    for tokens, lengths in (
        ([7, 8, 3, 1, 9, 2], [8, 6, 7]),
        ([7, 5, 3, 1, 8, 9], [7, 6, 6]),
        ([6, 8, 3, 1, 9, 2], [6, 6, 7]),
    ):
        for host in (True, False):
            assert draws.lengths(positions, torch.tensor(tokens), list, host).tolist() == lengths


def test_an_error_behind_a_guess_is_left_to_the_next_step() -> None:
    """Say the tokens before the error, as without guesses."""
    plan = StepPlan(step=0, chunks=(chunk(0, 7, 8), chunk(1, 7, 8), chunk(2, 7, 8)))
    outcome = Outcome(plan, {})
    tokens, finite = torch.tensor([7, 8, 3] * 3), torch.ones(9, dtype=torch.bool)
    finite[2] = finite[6] = False
    draws = Draws.of(plan.chunks, [0, 1, 2])
    outcome.add_tokens(draws.rows, Sampled(tokens, finite, errors={4: "planted"}))
    outcome.add_guesses([0, 2], torch.tensor([[1, 2, 99, 3], [1, -1, 3, 3]]), vocab_size=99)
    outcome.fetch(Transfers())
    rows = outcome.result().rows
    assert [row.token_ids for row in rows] == [(7, 8), (7,), ()]
    assert [row.drafts for row in rows] == [(1, 2), (), ()]
    assert [bool(row.error) for row in rows] == [False, False, True]
    assert [tuple(outcome.token_ids(row)) for row in range(2)] == [(7, 8), (7,)]
