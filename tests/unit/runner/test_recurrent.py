"""Groups without blocks: what the engine keeps for them, and the states that the runner keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from ferrule.engine.cache import KVCacheManager, footprint
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.model import ForwardContext, LayerCache, Model, StateSpec
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.runner.model_runner import ModelRunner
from ferrule.runner.state import RunnerLimits
from ferrule.types import Admit, CacheGroup, Chunk, EngineRequest, StepPlan, TokenSampling
from ferrule_plugins.attention.torch_sdpa import TorchSDPA
from ferrule_plugins.policy.fcfs import FcfsPolicy
from ferrule_plugins.sampler.default import DefaultSampler
from ferrule_testkit.fakes import FakeExecutor, FakeModel, solo

FULL, RECURRENT = CacheGroup("full", 4), CacheGroup("recurrent", 4)
VOCAB = 97
GREEDY = TokenSampling(seed=0, max_tokens=8, temperature=0.0)


def limits(*groups: CacheGroup, **more: Any) -> SchedulerLimits:
    given = {"num_blocks": 20, "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64, **more}
    return SchedulerLimits(groups=groups, **given)


def request(id: str, *prompt: int) -> EngineRequest:
    return EngineRequest(id=id, prompt_ids=prompt, sampling=GREEDY)


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


@pytest.mark.parametrize("groups", [(RECURRENT,), (FULL, RECURRENT)])
def test_no_prefix_is_reused(groups):
    scheduler = DefaultScheduler(limits(*groups), FcfsPolicy())
    executor = FakeExecutor(groups)
    executor.init_cache(20)
    for id in "ab":
        asked = request(id, *range(12))
        scheduler.add(asked, 0.0)
        said: list[int] = []
        while scheduler.has_work():
            plan = scheduler.schedule(0.0)
            deltas = scheduler.commit(plan, executor.submit(plan).result(), 0.0)
            said += [token for delta in deltas for token in delta.token_ids]
            assert all(delta.cached == 0 for delta in deltas)
        assert said == solo(FakeModel(groups, 32), asked, 64).token_ids
    assert (scheduler.stats().blocks_cached, scheduler.stats().prefix_queries) == (0, 0)


def test_a_model_of_states_alone_never_waits_for_blocks():
    scheduler = DefaultScheduler(limits(RECURRENT, num_blocks=2, max_num_batched_tokens=200), FcfsPolicy())
    for number in range(5):
        scheduler.add(request(f"r{number}", *range(50)), 0.0)
    assert scheduler.schedule(0.0).num_tokens == 200
    assert (scheduler.stats().running, scheduler.stats().waiting) == (4, 1)  # slots are the only bound
    scheduler.check()


# ------------------------------------------------------------------------------------------- runner


class Adder(Model):
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
    made = ModelRunner(
        Adder(),
        TorchSDPA(),
        DefaultSampler(None),
        RunnerLimits(slots=3, max_model_len=32, vocab_size=VOCAB, dtype=torch.float32, device=cpu),
    )
    made.init_cache(2)
    return made


def admit(slot, *ids):
    return Admit(slot, f"r{slot}", 0, ids, len(ids), GREEDY)


def run(runner, *chunks, admits=(), releases=()):
    """Chunks are (slot, start, count, samples). Returns each row's tokens."""
    made = tuple(Chunk(slot, f"r{slot}", 0, start, count, samples) for slot, start, count, samples in chunks)
    return [row.token_ids for row in runner.execute(StepPlan(0, made, admits, releases)).rows]


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


def test_the_cache_can_be_made_anew(runner):
    run(runner, (0, 0, 2, True), admits=(admit(0, 7, 8),))
    runner.init_cache(2)
    assert not runner.recurrent.tensors["sum"].any()
