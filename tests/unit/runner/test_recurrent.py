"""Groups without blocks: what the engine keeps for them, and the states that the runner keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from ferrule.engine.cache import KVCacheManager, footprint
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.model import ForwardContext, Generates, LayerCache, Model, StateSpec
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.runner.model_runner import ModelRunner, RunnerParts
from ferrule.runner.state import RunnerLimits
from ferrule.types import Admit, CacheGroup, Chunk, EngineRequest, StepPlan, TokenSampling
from ferrule_plugins.attention.torch_sdpa import TorchSDPA
from ferrule_plugins.policy.fcfs import FcfsPolicy
from ferrule_plugins.sampler.default import DefaultSampler
from ferrule_testkit.fakes import FakeModel, solo
from tests.fakes.executor import FakeExecutor

FULL, RECURRENT = CacheGroup("full", 4), CacheGroup("recurrent", 4)
VOCAB = 97
GREEDY = TokenSampling(seed=0, max_tokens=8, temperature=0.0)


def limits(*groups: CacheGroup, **more: Any) -> SchedulerLimits:
    given = {"num_blocks": 20, "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64, **more}
    return SchedulerLimits(groups=groups, **given)


def request(id: str, *prompt: int) -> EngineRequest:
    return EngineRequest(id=id, prompt_ids=prompt, work=GREEDY)


# ------------------------------------------------------------------------------------------- engine


def test_a_state_takes_no_blocks():
    assert footprint(limits(RECURRENT), 10**6) == 0
    assert footprint(limits(FULL, RECURRENT), 60) == footprint(limits(FULL), 60)
    cache = KVCacheManager(limits(RECURRENT))
    hit = cache.match(None, range(30))
    assert cache.reserve("a", 30, hit) == ()
    assert cache.reserve("a", 60) == ()
    cache.confirm("a", range(60), 60)
    assert (cache.pool.num_used, cache.owed("a", 64)) == (0, 0)
    cache.check(frozenset("a"))
    cache.release("a")
    cache.check(frozenset())


def test_tables_beside_a_state_are_as_without():
    cache, plain = KVCacheManager(limits(FULL, RECURRENT)), KVCacheManager(limits(FULL, prefix_caching=False))
    for manager in (cache, plain):
        assert manager.reserve("a", 6, manager.match(None, range(9))) == ((1, 2),)
        assert manager.reserve("a", 9) == ((3,),)
        manager.check(frozenset("a"))


class Served:
    """A scheduler over a fake device. `cached` gives how much of a request's prompt was found; its text is checked."""

    def __init__(self, groups: tuple[CacheGroup, ...], num_snapshots: int, **more: Any) -> None:
        self.groups = groups
        more = {"max_num_batched_tokens": 60, **more}
        self.scheduler = DefaultScheduler(limits(*groups, num_snapshots=num_snapshots, **more), FcfsPolicy())
        self.executor = FakeExecutor(groups, num_snapshots=num_snapshots)
        self.executor.init_cache(self.scheduler.limits.num_blocks)

    def cached(self, prompt: Sequence[int], **sampling: Any) -> int:
        settings = TokenSampling(**{"seed": 0, "max_tokens": 2, **sampling})
        asked = EngineRequest(id="r", prompt_ids=tuple(prompt), work=settings)
        self.scheduler.add(asked, 0.0)
        said: list[int] = []
        while self.scheduler.has_work():
            plan = self.scheduler.schedule(0.0)
            deltas = self.scheduler.commit(plan, self.executor.submit(plan).result(), 0.0)
            said += [token for delta in deltas for token in delta.token_ids]
            self.scheduler.check()
        assert said == solo(FakeModel(self.groups, 32), asked, 64).token_ids
        return deltas[-1].cached

    def chunks(self) -> list[tuple[int, int]]:
        """Return (start, count) of all that was computed, single tokens left out."""
        return [(row.start, row.count) for plan in self.executor.plans for row in plan.chunks if row.count > 1]


BOTH = [(RECURRENT,), (FULL, RECURRENT)]


@pytest.mark.parametrize("groups", BOTH)
def test_no_prefix_is_reused_without_room_for_states(groups):
    served = Served(groups, 0)
    assert [served.cached(range(20)) for _ in range(2)] == [0, 0]
    assert (served.scheduler.stats().blocks_cached, served.scheduler.stats().prefix_queries) == (0, 0)
    assert served.chunks() == [(0, 20), (0, 20)]


@pytest.mark.parametrize("groups", [*BOTH, (CacheGroup("sliding", 4, 6), RECURRENT)])
def test_states_are_saved_at_the_last_full_block(groups):
    served = Served(groups, 4)
    assert [served.cached(range(count)) for count in (22, 22, 21, 20, 44, 44)] == [0, 20, 20, 0, 20, 40]
    assert served.chunks() == [(0, 20), (20, 2), (20, 2), (0, 16), (16, 4), (20, 20), (40, 4), (40, 4)]
    assert served.scheduler.stats().snapshots == 3
    assert served.cached(range(44), prompt_logprobs=0) == 0  # and its states are not saved once more
    assert served.scheduler.stats().snapshots == 3
    assert served.scheduler.reset_cache()
    assert served.scheduler.stats().snapshots == 0


def test_states_are_saved_where_prompts_part():
    served = Served((FULL, RECURRENT), 8, num_blocks=60)
    first, second, third = ([*range(24), *range(end, end + 17)] for end in (40, 60, 80))
    assert [served.cached(prompt) for prompt in (first, second, third)] == [0, 0, 24]
    assert served.chunks() == [(0, 40), (0, 24), (24, 16), (24, 16)]  # and one last token each


def test_states_are_saved_while_tokens_are_generated():
    served = Served((RECURRENT,), 8, max_model_len=64)
    assert served.cached(range(6), max_tokens=40) == 0
    said = solo(
        FakeModel((RECURRENT,), 32),
        EngineRequest(id="r", prompt_ids=tuple(range(6)), work=TokenSampling(seed=0, max_tokens=40)),
        64,
    ).token_ids
    assert served.cached([*range(6), *said, 1, 2]) == 32  # every 16th


def test_prompts_that_wait_for_their_last_tokens_are_not_in_progress():
    served = Served((FULL, RECURRENT), 8, num_blocks=60)
    for number in range(3):
        served.scheduler.add(request(f"r{number}", *range(number, number + 19)), 0.0)
    plan = served.scheduler.schedule(0.0)
    assert [(row.start, row.count, row.save) for row in plan.chunks] == [(0, 16, 1), (0, 16, 2), (0, 16, 3)]
    plan = served.scheduler.schedule(0.0)
    assert [(row.start, row.count, row.save) for row in plan.chunks] == [(16, 3, 0)] * 3


def test_the_oldest_states_make_room():
    served = Served((FULL, RECURRENT), 2, num_blocks=60)
    texts = [[number] * 19 for number in range(3)]
    assert [served.cached(text) for text in texts] == [0, 0, 0]
    assert served.scheduler.stats().snapshots == 2
    assert [served.cached(text) for text in texts[::-1]] == [16, 16, 0]
    assert served.cached(texts[1]) == 16


def test_states_go_with_their_blocks():
    served = Served((FULL, RECURRENT), 8, num_blocks=12)
    assert [served.cached([number] * 19) for number in range(2)] == [0, 0]
    assert served.scheduler.stats().snapshots == 2
    assert served.cached(range(40)) == 0
    assert served.scheduler.stats().snapshots == 1


def test_a_model_of_states_alone_never_waits_for_blocks():
    scheduler = DefaultScheduler(limits(RECURRENT, num_blocks=2, max_num_batched_tokens=200), FcfsPolicy())
    for number in range(5):
        scheduler.add(request(f"r{number}", *range(50)), 0.0)
    assert scheduler.schedule(0.0).num_tokens == 200
    assert (scheduler.stats().running, scheduler.stats().waiting) == (4, 1)  # slots are the only bound
    scheduler.check()


# ------------------------------------------------------------------------------------------- runner


class Adder(Model, Generates):
    """The next token is the sum of all tokens so far; a second state counts them in another type."""

    def cache_specs(self) -> dict[str, LayerCache]:
        return {}

    def state_specs(self) -> dict[str, StateSpec]:
        return {"sum": StateSpec((2, 1)), "count": StateSpec((), torch.int64)}

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        rows, counts = ctx.state("sum"), ctx.state("count")
        assert rows.data.dtype is torch.float32
        assert rows.query_lens_host == tuple(rows.query_start.diff().tolist())
        hidden = torch.empty(len(ids), 1)
        for row, slot in enumerate(rows.slots.tolist()):
            first, stop = rows.query_start[row : row + 2].tolist()
            assert counts.data[slot] == ctx.positions[first]
            sums = rows.data[slot, 1] + ids[first:stop].cumsum(0)
            hidden[first:stop, 0] = sums
            rows.data[slot, 1] = sums[-1]
            counts.data[slot] += stop - first
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() % VOCAB, VOCAB).float()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()


@pytest.fixture
def runner():
    cpu = torch.device("cpu")
    limits = RunnerLimits(slots=3, max_model_len=32, vocab_size=VOCAB, dtype=torch.float32, device=cpu)
    parts = RunnerParts(model=Adder(), attention=TorchSDPA(), sampler=DefaultSampler(None), limits=limits)
    made = ModelRunner(parts)
    made.init_cache(2)
    return made


def admit(slot, *ids, restore=0):
    return Admit(slot=slot, id=f"r{slot}", epoch=0, known_ids=ids, num_prompt=len(ids), work=GREEDY, restore=restore)


def run(runner, *chunks, admits=(), releases=()):
    """Run chunks: (slot, start, count, samples) and maybe a snapshot to save to. Returns each row's tokens."""
    made = tuple(
        Chunk(
            slot=slot,
            id=f"r{slot}",
            epoch=0,
            start=start,
            count=count,
            ends="sample" if samples else "",
            save=sum(save),
        )
        for slot, start, count, samples, *save in chunks
    )
    return [
        row.token_ids for row in runner.execute(StepPlan(step=0, chunks=made, admits=admits, releases=releases)).rows
    ]


def test_the_group_is_described(runner):
    assert [(group.kind, group.num_layers, group.paged) for group in runner.cache.groups] == [("recurrent", 2, False)]
    assert runner.cache.paged == ()
    assert runner.cache.page_size == 0
    assert runner.recurrent.num_bytes == 3 * (2 * 4 + 8)


def test_states_follow_their_requests(runner):
    admits = (admit(2, 1, 2, 3, 4, 5), admit(0, 50))
    assert run(runner, (2, 0, 3, False), (0, 0, 1, True), admits=admits) == [(), (50,)]
    assert run(runner, (0, 1, 1, True), (2, 3, 2, True)) == [(100 % VOCAB,), (15,)]
    assert run(runner, (2, 5, 1, True)) == [(30,)]
    assert run(runner, (0, 2, 1, True), (2, 6, 1, True)) == [(103 % VOCAB,), (60,)]
    runner.check()


def test_a_slot_begins_with_zeros_whoever_had_it(runner):
    run(runner, (1, 0, 2, True), admits=(admit(1, 7, 8),))
    runner.recurrent.tensors["sum"].fill_(float("nan"))
    again = (admit(1, 9),)
    assert run(runner, (1, 0, 1, True), admits=again, releases=(1,)) == [(9,)]
    assert runner.recurrent.tensors["sum"][0].isnan().all()  # nobody was admitted there


def test_states_are_saved_and_restored(runner):
    runner.init_cache(2, 2)
    first = admit(0, 1, 2, 3, 4), admit(2, 10, 20)
    assert run(runner, (0, 0, 3, False, 2), (2, 0, 2, True, 1), admits=first) == [(), (30,)]
    assert run(runner, (0, 3, 1, True)) == [(10,)]
    # a snapshot that is read is written anew in the same step
    again = admit(1, 1, 2, 3, 9, restore=2), admit(2, 10, 20, 7, 8, restore=1)
    assert run(runner, (1, 3, 1, True), (2, 2, 1, False, 2), admits=again, releases=(2,)) == [(15,), ()]
    assert run(runner, (0, 3, 1, True), admits=(admit(0, 10, 20, 7, 1, restore=2),), releases=(0,)) == [(38,)]
    assert run(runner, (2, 3, 1, True)) == [(45,)]


def test_the_cache_can_be_made_anew(runner):
    run(runner, (0, 0, 2, True), admits=(admit(0, 7, 8),))
    runner.init_cache(2)
    assert not runner.recurrent.tensors["sum"].any()
