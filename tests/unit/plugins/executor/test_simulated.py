"""The executor without a device, and the figures that are taken with it."""

from __future__ import annotations

import pytest

from ferrule.config import Config, LoadConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError, EngineDead
from ferrule.plugin import discover
from ferrule.types import Admit, Chunk, StepPlan, TokenSampling
from ferrule_contrib import tiny
from ferrule_plugins.executor.simulated import SimulatedExecutor
from tools.benchmarks.simulate import main


def started(**options: object) -> SimulatedExecutor:
    executor = SimulatedExecutor()
    config = resolve(
        Config(model=ModelConfig(model=str(tiny.path())), load=LoadConfig(model_loader_extra_config=options))
    )
    executor.start(config, discover())
    executor.init_cache(8)
    return executor


def plan(step: int, start: int, count: int, blocks: tuple[tuple[int, ...], ...] = ()) -> StepPlan:
    sampling = TokenSampling(seed=9, max_tokens=4, logprobs=2, prompt_logprobs=0)
    admits = (Admit(slot=0, id="a", epoch=1, known_ids=(5, 6, 7), num_prompt=3, work=sampling),) if blocks else ()
    return StepPlan(
        step=step,
        chunks=(Chunk(slot=0, id="a", epoch=1, start=start, count=count, ends="sample", new_blocks=blocks),),
        admits=admits,
    )


def test_a_token_depends_on_seed_and_position_alone() -> None:
    executor = started()
    first = executor.submit(plan(1, 0, 3, ((4,),))).result().rows[0]
    second = executor.submit(plan(2, 3, 1)).result().rows[0]
    again = executor.submit(plan(3, 0, 3, ((6,),))).result().rows[0]
    assert first == again
    assert first.token_ids != second.token_ids
    assert [len(first.logprobs), len(first.logprobs[0].top)] == [1, 2]
    assert [entry.token_id for entry in first.prompt_logprobs] == [6, 7]
    assert second.prompt_logprobs == ()


def test_a_step_takes_its_time() -> None:
    executor = started(step_seconds=30, token_seconds=0.5)
    handle = executor.submit(plan(1, 0, 3, ((4,),)))
    assert not handle.done()
    assert handle._due - executor.submit(plan(2, 3, 1))._due == pytest.approx(-30.5)


@pytest.mark.parametrize("options", [{"step": 1}, {"step_seconds": -1}, {"token_seconds": "1"}])
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="step_seconds and token_seconds"):
        started(**options)


def test_sleep_forgets_the_requests() -> None:
    executor = started()
    executor.submit(plan(1, 0, 3, ((4,),))).result()
    executor.call("release", (("weights", "kv_cache"), 1))
    executor.call("restore", ("weights",))
    assert executor.submit(plan(2, 0, 3, ((4,),))).result().rows[0].token_ids
    executor.shutdown()
    with pytest.raises(EngineDead):
        executor.submit(plan(3, 3, 1))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--running", "4", "--waiting", "9"], "4 running      9 waiting"),
        (["--running", "3", "--frontend"], "3 streams"),
        (["--long", "5000"], "during"),
    ],
)
def test_the_command_prints_figures(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert says in capsys.readouterr().out
