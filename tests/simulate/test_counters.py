"""Requests that end in every way, on an engine that may die: once nothing is open, the figures of finished choices add
up to the totals, and the totals are what the engine says.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ferrule.client.demux import DemuxClient
from ferrule.engine.loop import EngineLoop
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.errors import EngineDead, UnavailableError
from ferrule.frontend.service import FrontendService
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.interfaces.service import Generate, Output, Prompt
from ferrule.interfaces.stats import RequestStats
from ferrule.sampling_params import SamplingParams
from ferrule.types import CacheGroup
from ferrule.wire.messages import FromEngine, Ready, ToEngine
from ferrule_plugins.stat_logger.prometheus import Prometheus
from ferrule_testkit.simulate import load
from tests.fakes.engine import fake_info
from tests.fakes.executor import FakeExecutor
from tests.fakes.frontend import FakePlugins, model_folder, serving
from tests.shared import some

VOCAB = 16
GROUPS = (CacheGroup("full", 2),)
LIMITS = SchedulerLimits(
    groups=GROUPS, num_blocks=22, max_num_seqs=8, max_num_batched_tokens=12, max_model_len=40, depth=2
)
PER_CHOICE = ("prompt_tokens", "generation_tokens", "queue_time_seconds", "params_max_tokens", "num_preemptions")


class Engines(DemuxClient):
    """A client, and the engine that it reaches: one after the other. A step brings at most one answer back."""

    def __init__(self, restarts: bool) -> None:
        super().__init__(restarts=restarts)
        self.posted: list[ToEngine] = []
        self.begin()

    def begin(self) -> None:
        self.executor = FakeExecutor(GROUPS, VOCAB)
        self.executor.init_cache(LIMITS.num_blocks)
        self.scheduler = DefaultScheduler(LIMITS, load("policy", "chaos")())
        self.loop = EngineLoop(self.scheduler, self.executor, self, time.monotonic, debug=True)
        self._dispatch(Ready(fake_info(VOCAB, LIMITS.max_model_len, 2), LIMITS.num_blocks))

    def _post(self, message: ToEngine) -> None:
        self.posted.append(message)

    def receive(self, timeout: float) -> list[tuple[bytes, ToEngine]]:
        posted, self.posted = self.posted, []
        return [(b"client", message) for message in posted]

    def send(self, client: bytes, message: FromEngine) -> None:
        self._dispatch(message)

    async def close(self) -> None:
        self.die("closed")


class World:
    """Random requests from clients that read to the end, leave, or are cancelled."""

    def __init__(self, rng: random.Random, service: FrontendService, engines: Engines) -> None:
        self.rng = rng
        self.service = service
        self.engines = engines
        self.clients: dict[asyncio.Task[None], None] = {}  # in the order in which they came
        self.choices = 0

    async def run(self, deaths: float) -> None:
        rng, engines = self.rng, self.engines
        for _ in range(250):
            if rng.random() < 0.3 and len(self.clients) < 8:
                await self.begin_client()
            if rng.random() < 0.05 and self.clients:
                rng.choice(list(self.clients)).cancel()
            if rng.random() < 0.03 and engines.scheduler.running and engines.executor.device is not None:
                engines.executor.device.failing.add(rng.choice(list(engines.scheduler.running)))
            if rng.random() < deaths:
                engines.posted.clear()
                engines.lose("The engine died.")
                await self.turns()
                engines.begin()
            if rng.random() < 0.9:
                engines.loop.step()
            await self.turns()
        for _ in range(5000):
            engines.loop.step()
            await self.turns()
            if not (self.clients or self.service.ledger.open):
                return
        raise AssertionError(f"{len(self.clients)} clients and {self.service.ledger.open} choices still wait")

    async def turns(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            await asyncio.sleep(0)

    async def begin_client(self) -> None:
        request = self.draw()
        with suppress(UnavailableError):
            stream = (await self.service.admit(request)).outputs()
            width = max(request.params.n or 1, request.params.best_of or 1)
            self.choices += len(request.prompts) * width
            task = asyncio.create_task(self.read(stream, self.rng.choice((0, 1, 3, 999, 999, 999))))
            self.clients[task] = None
            task.add_done_callback(self.clients.pop)
            await asyncio.sleep(0)  # it begins, so that it also closes

    def draw(self) -> Generate:
        rng = self.rng
        base = tuple(rng.choice((4, 5)) for _ in range(rng.randint(1, 10)))
        kind, n = rng.randrange(8), rng.choice((1, 1, 2, 3))
        params = SamplingParams(
            n=n,
            best_of=n + 2 if kind == 0 else None,
            max_tokens=rng.randint(1, 30),
            stop=["\x07"] if rng.random() < 0.4 else [],
            stop_token_ids=[1] if rng.random() < 0.4 else [],
        )
        prompts = (Prompt(ids=base),) * rng.choice((1, 1, 2))
        return Generate(prompts=prompts, params=params, streamed=rng.random() < 0.5 and kind > 0)

    async def read(self, stream: AsyncIterator[Output], most: int) -> None:
        with suppress(EngineDead):
            count = 0
            try:
                while count < most:
                    output = await anext(stream, None)
                    if output is None:
                        break
                    count += 1
            finally:
                await stream.aclose()


def figures(service: FrontendService) -> Counter[str]:
    """Return figures by name, without labels: values under one name are added up."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(service.exposition()[1]):
        for sample in family.samples:
            found[sample.name.removeprefix("vllm:")] += sample.value  # type: ignore[assignment]
            for value in sample.labels.values():
                found[f"{sample.name.removeprefix('vllm:')} {value}"] += sample.value  # type: ignore[assignment]
    return found


async def run(seed: int, folder: Path, deaths: float = 0.0) -> tuple[Counter[str], Engines, World, list[RequestStats]]:
    finished: list[RequestStats] = []

    class Logger(Prometheus):
        def on_finish(self, stats: RequestStats) -> None:
            finished.append(stats)
            super().on_finish(stats)

    engines: Any = Engines(restarts=deaths > 0)
    rng = random.Random(seed)
    plugins = FakePlugins(stat_logger={"prometheus": Logger})
    async with serving(model_folder(folder), engines, plugins, model={"generation_config": "vllm"}) as service:
        world = World(rng, service, engines)
        await world.run(deaths)
        assert service.ledger.waiting == service.ledger.waiting_tokens == 0
        return figures(service), engines, world, finished


def judge(found: Counter[str], world: World, finished: list[RequestStats]) -> None:
    assert found["generation_tokens_total"] == found["request_generation_tokens_sum"]
    assert found["prompt_tokens_total"] == found["request_prompt_tokens_sum"]
    assert found["prompt_tokens_by_source_total local_compute"] == found["request_prefill_kv_computed_tokens_sum"]
    assert found["prompt_tokens_total"] == found["prompt_tokens_by_source_total"]
    assert found["request_success_total"] == world.choices == len(finished)
    assert {found[f"request_{name}_count"] for name in PER_CHOICE} == {world.choices}
    for stats in finished:
        phases = stats.queue_time + stats.prefill_time + stats.decode_time
        assert 0 < stats.queue_time <= phases <= stats.end_to_end + 1e-9


@pytest.mark.parametrize("seed", some(range(6)))
async def test_figures_of_choices_add_up_to_the_totals(seed: int, tmp_path: Path) -> None:
    found, engines, world, finished = await run(seed, tmp_path)
    judge(found, world, finished)
    said = engines.scheduler.stats()
    assert (said.prompt_tokens, said.generation_tokens) == (
        found["prompt_tokens_total"],
        found["generation_tokens_total"],
    )
    assert said.preemptions == found["request_num_preemptions_sum"]
    assert {stats.finish.value for stats in finished} == {"stop", "length", "abort", "error"}


@pytest.mark.parametrize("seed", some(range(4)))
async def test_they_do_when_engines_die(seed: int, tmp_path: Path) -> None:
    found, engines, world, finished = await run(seed, tmp_path, deaths=0.02)
    judge(found, world, finished)
    assert engines.stats().restarts > 0
