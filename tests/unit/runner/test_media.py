"""Media in the whole engine, with a model that sees: scheduler, runner, encoder, positions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.model import BuildContext
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.runner.model_runner import ModelRunner, RunnerParts
from ferrule.runner.state import RunnerLimits
from ferrule.types import Admit, Chunk, EngineRequest, HostTensor, MediaItem, StepPlan, TokenSampling
from ferrule_plugins.attention.torch_sdpa import TorchSDPA
from ferrule_plugins.policy.fcfs import FcfsPolicy
from ferrule_plugins.sampler.default import DefaultSampler
from tests.fakes.media_model import SeeingModel

VOCAB, SIZE, BLOCK, MAX_LEN = 31, 16, 4, 64
GREEDY = TokenSampling(seed=0, max_tokens=8, temperature=0.0)


def image(name: str, start: int, *grid: int) -> MediaItem:
    count = int(torch.tensor(grid).prod())
    pixels = torch.randn(count, 3, generator=torch.Generator().manual_seed(sum(name.encode())))
    tensor = HostTensor(shape=(count, 3), dtype="float32", data=pixels.numpy().tobytes())
    return MediaItem(kind="image", digest=name.encode(), start=start, count=count, grid=grid, data={"pixels": tensor})


class Engine:
    """A scheduler over a runner, one step after the other."""

    def __init__(self, **limits: int | bool) -> None:
        torch.manual_seed(0)
        cpu = torch.device("cpu")
        config = {"vocab_size": VOCAB, "hidden_size": SIZE}
        ctx = BuildContext(config=config, dtype=torch.float32, device=cpu, block_size=BLOCK, max_model_len=MAX_LEN)
        self.model = SeeingModel(ctx)
        for parameter in self.model.parameters():
            parameter.data.normal_(0, 1)
        limit = RunnerLimits(slots=4, max_model_len=MAX_LEN, vocab_size=VOCAB, dtype=torch.float32, device=cpu)
        sampler = DefaultSampler(None)  # type: ignore[arg-type]
        self.runner = ModelRunner(RunnerParts(model=self.model, attention=TorchSDPA(), sampler=sampler, limits=limit))
        given = {"num_blocks": 60, "max_num_batched_tokens": 64, **limits}
        made = SchedulerLimits(groups=self.runner.cache.groups, max_num_seqs=4, max_model_len=MAX_LEN, **given)
        self.scheduler = DefaultScheduler(made, FcfsPolicy())
        self.runner.init_cache(made.num_blocks)
        self.plans: list[StepPlan] = []

    def run(self, *requests: EngineRequest) -> dict[str, list[int]]:
        said: dict[str, list[int]] = {request.id: [] for request in requests}
        for request in requests:
            self.scheduler.add(request, 0.0)
        while (plan := self.scheduler.schedule(0.0)) is not None:
            self.plans.append(plan)
            for delta in self.scheduler.commit(plan, self.runner.execute(plan), 0.0):
                assert delta.error is None
                said[delta.id] += delta.token_ids
        self.scheduler.check()
        return said

    def check(self, request: EngineRequest, said: Sequence[int]) -> None:
        """Check that every token is the best one after those before it, as computed in one pass."""
        num_prompt = len(request.prompt_ids)
        logits = self.model.alone([*request.prompt_ids, *said], num_prompt, request.media)
        assert logits[num_prompt - 1 : -1].argmax(-1).tolist() == list(said)


def asked(id: str, prompt: Sequence[int], *media: MediaItem, salt: str | None = None) -> EngineRequest:
    return EngineRequest(id=id, prompt_ids=tuple(prompt), work=GREEDY, media=media, cache_salt=salt)


TWO = asked("two", [1, 2, *[0] * 6, 3, *[0] * 4, 4, 5], image("cat", 2, 1, 2, 3), image("dog", 9, 1, 2, 2))
ONE = asked("one", [*[0] * 12, 7], image("owl", 0, 3, 2, 2))
TEXT = asked("text", [8, 9, 10])


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"encode_budget": 6},
        {"encode_budget": 1, "encoded_tokens": 12},
        {"num_blocks": 12, "max_num_batched_tokens": 7},
        {"prefix_caching": False, "chunked_prefill": False},
    ],
)
def test_output_is_that_of_one_pass(limits: dict[str, int | bool]) -> None:
    engine = Engine(**limits)
    said = engine.run(TWO, TEXT, ONE)
    for request in (TWO, TEXT, ONE):
        assert len(said[request.id]) == 8
        engine.check(request, said[request.id])


def test_the_second_turn_encodes_what_is_new_only() -> None:
    engine = Engine()
    said = engine.run(TWO)["two"]
    before = [*TWO.prompt_ids, *said]
    second = asked("second", [*before, 1, *[0] * 4, 2], *TWO.media, image("cow", len(before) + 1, 1, 2, 2))
    engine.check(second, engine.run(second)["second"])
    assert engine.model.num_encoded == 3
    other = asked("other", TWO.prompt_ids, image("fox", 2, 1, 2, 3), TWO.media[1])
    engine.check(other, engine.run(other)["other"])
    assert engine.model.num_encoded == 4  # the dog is behind another image, and its embeddings are there
    salted = asked("salted", TWO.prompt_ids, *TWO.media, salt="mine")
    engine.check(salted, engine.run(salted)["salted"])
    assert engine.model.num_encoded == 6


def test_a_model_that_encodes_nothing_or_something_else() -> None:
    engine = Engine()
    engine.model._see = lambda item: torch.zeros(2, SIZE)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"SeeingModel.encode returned \[\(2, 16\)\] for 1 items"):
        engine.run(ONE)


def test_forgotten_embeddings_are_gone_and_slots_begin_anew() -> None:
    runner = Engine().runner
    item = image("owl", 0, 1, 1, 2)
    admit = Admit(slot=0, id="a", epoch=0, known_ids=(0, 0, 1), num_prompt=3, work=GREEDY, media=(item,))
    chunk = Chunk(slot=0, id="a", epoch=0, start=0, count=3, ends="sample", new_blocks=((1,),))
    (row,) = runner.execute(StepPlan(step=0, chunks=(chunk,), admits=(admit,), encodes=(item,))).rows
    assert row.error is None
    plan = StepPlan(step=1, chunks=(chunk,), admits=(admit,), releases=(0,), forgets=(item.digest,))
    assert runner.execute(plan).rows[0].error == "The prompt's embeddings do not fit the model."
    text = Admit(slot=0, id="a", epoch=0, known_ids=(5, 6, 1), num_prompt=3, work=GREEDY)
    (row,) = runner.execute(StepPlan(step=2, chunks=(chunk,), admits=(text,), releases=(0,))).rows
    wanted = runner.model.alone([5, 6, 1], 3, ())  # type: ignore[attr-defined]
    assert row.token_ids == (int(wanted[-1].argmax()),)
