"""Rows that end with a vector, beside rows that end with a token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch

from ferrule.interfaces.model import ForwardContext, Generates, LayerCache, Model, PoolRow, Pools
from ferrule.runner.model_runner import ModelRunner, RunnerParts
from ferrule.runner.state import RunnerLimits
from ferrule.types import Admit, Chunk, Pooling, RowResult, StepPlan, TokenSampling, Work
from ferrule_plugins.attention.torch_sdpa import TorchSDPA
from ferrule_plugins.sampler.default import DefaultSampler

VOCAB = 16
GREEDY = TokenSampling(seed=0, max_tokens=4, temperature=0.0)
BAD = 9  # a token whose hidden state is not a number


class Encoder(Model, Pools):
    """A model that keeps nothing. A hidden state is the token and its position, a vector is their sums."""

    splits_prompts = False

    def cache_specs(self) -> dict[str, LayerCache]:
        return {}

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        hidden = torch.stack([ids, ctx.positions], dim=1).float()
        return hidden.masked_fill((ids == BAD).unsqueeze(1), torch.nan)

    def pool(self, hidden: torch.Tensor, rows: Sequence[PoolRow]) -> torch.Tensor:
        sums = torch.stack([hidden[row.first : row.first + row.count].sum(0) for row in rows])
        return torch.stack([s / s.norm() if row.work.normalize else s for s, row in zip(sums, rows, strict=True)])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()


class Both(Encoder, Generates):
    """The token after t is t + 1."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((hidden[:, 0].long() + 1) % VOCAB, VOCAB).float()


def runner(model: Model) -> ModelRunner:
    limits = RunnerLimits(slots=4, max_model_len=8, vocab_size=VOCAB, dtype=torch.float32, device=torch.device("cpu"))
    made = ModelRunner(RunnerParts(model=model, attention=TorchSDPA(), sampler=DefaultSampler(None), limits=limits))
    made.init_cache(1)
    return made


def run(model: Model, *requests: tuple[tuple[int, ...], Work], ends: str | None = None) -> tuple[RowResult, ...]:
    """Run one step that computes these prompts whole."""
    chunks, admits = [], []
    for slot, (ids, work) in enumerate(requests):
        admits.append(Admit(slot=slot, id=f"r{slot}", epoch=1, known_ids=ids, num_prompt=len(ids), work=work))
        end = work.ends if ends is None else ends
        chunks.append(Chunk(slot=slot, id=f"r{slot}", epoch=1, start=0, count=len(ids), ends=end))  # type: ignore[arg-type]
    return runner(model).execute(StepPlan(step=1, chunks=tuple(chunks), admits=tuple(admits))).rows


def vector(row: RowResult) -> list[float]:
    assert row.vector is not None
    return torch.frombuffer(bytearray(row.vector), dtype=torch.float32).tolist()


def test_vectors_and_tokens_come_of_one_step_each_to_its_row() -> None:
    asking = TokenSampling(seed=0, max_tokens=4, temperature=0.0, logprobs=1)
    rows = run(Both(), ((1, 2), Pooling()), ((3,), asking), ((4, 5, 6), Pooling()), ((7, 7), GREEDY))
    assert [(len(row.token_ids), row.vector is None) for row in rows] == [(0, False), (1, True)] * 2
    assert [vector(rows[0]), vector(rows[2])] == [[3.0, 1.0], [15.0, 3.0]]
    assert [rows[1].token_ids, rows[3].token_ids] == [(4,), (8,)]
    assert rows[1].logprobs[0].token_id == 4
    assert vector(run(Encoder(), ((1, 2, 1), Pooling(normalize=True)))[0]) == pytest.approx([0.8, 0.6])


def test_the_longest_prompt_is_pooled() -> None:
    assert vector(run(Encoder(), ((1,) * 8, Pooling()))[0]) == [8.0, 28.0]


def test_a_vector_that_is_not_finite_ends_its_request_and_no_other() -> None:
    first, second = run(Encoder(), ((1, BAD), Pooling()), ((1, 2), Pooling()))
    assert first.error == "The model computed numbers that are not finite."
    assert first.vector is None
    assert vector(second) == [3.0, 1.0]


def test_a_prompt_in_pieces_of_which_none_ends_gives_nothing() -> None:
    (row,) = run(Encoder(), ((1, 2), Pooling()), ends="")
    assert (row.token_ids, row.vector, row.error) == ((), None, None)


@pytest.mark.parametrize(
    ("model", "work", "ends"),
    [(Encoder(), GREEDY, "sample"), (Both(), Pooling(), "sample"), (Both(), GREEDY, "pool")],
)
def test_a_plan_that_asks_for_what_is_not_there_is_broken(model: Model, work: Work, ends: str) -> None:
    with pytest.raises(RuntimeError, match=r"a plan (samples|pools)"):
        run(model, ((1, 2), work), ends=ends)
