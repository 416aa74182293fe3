"""What engines are given from outside, so that they can be compared: the root of block digests, and the clock."""

from __future__ import annotations

from typing import Any

from ferrule.assembly.engine import Engine, build_engine, open_executor
from ferrule.config import Config, ModelConfig, ParallelConfig
from ferrule.config.resolve import resolve
from ferrule.plugin import Plugins, discover
from ferrule.types import EngineRequest, TokenSampling
from ferrule.wire.messages import Submit
from ferrule.wire.queues import QueueChannel
from ferrule_contrib import tiny

PROMPT = tuple(range(5, 90))


def served(plugins: Plugins, root: bytes, now: float = 0.0) -> tuple[set[bytes], Any]:
    """Return digests of the blocks that one request leaves in an engine's cache, and the times in its last delta."""
    parallel = ParallelConfig(distributed_executor_backend="simulated")
    config = resolve(Config(model=ModelConfig(model=str(tiny.path())), parallel=parallel))
    deltas: list[Any] = []
    channel = QueueChannel(lambda message: deltas.extend(getattr(message, "deltas", ())))
    executor = open_executor(config, plugins)
    engine: Engine = build_engine(config, plugins, channel, executor, cache_root=root, clock=lambda: now)
    sampling = TokenSampling(seed=1, max_tokens=2, temperature=0.0)
    channel.post(Submit(EngineRequest(id="a", prompt_ids=PROMPT, work=sampling, arrival=now)))
    engine.loop.run(lambda: any(delta.finish for delta in deltas))
    scheduler: Any = engine.loop.scheduler
    return set(scheduler.cache.pool._published), deltas[-1].times


def test_engines_with_the_same_root_give_the_same_digests() -> None:
    plugins = discover()
    one, other, third = (served(plugins, root)[0] for root in (b"a", b"a", b"b"))
    assert len(one) == len(PROMPT) // 16
    assert one == other
    assert not one & third


def test_times_are_those_of_the_clock_that_is_given() -> None:
    times = served(discover(), b"a", now=7.0)[1]
    assert (times.arrival, times.scheduled, times.first_token, times.finished) == (7.0, 7.0, 7.0, 7.0)
