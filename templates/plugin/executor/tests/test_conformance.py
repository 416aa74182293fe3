from typing import Any

from ferrule.config import Config
from ferrule.interfaces.executor import Executor
from ferrule.types import CacheGroup, StepPlan
from ferrule_example import ExampleExecutor
from ferrule_testkit.fakes import FakeExecutor
from ferrule_testkit.kits import ExecutorKit


class TestConformance(ExecutorKit):
    plugin = ExampleExecutor


class OneExecutor:
    """Stands for the set of plugins: the executor behind the example is the one that is given."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def make(self, kind: str, name: str) -> Any:
        return self.executor


def test_two_steps_in_flight() -> None:
    executor = ExampleExecutor()
    executor.start(Config(), OneExecutor(FakeExecutor((CacheGroup("full", 16),))))  # type: ignore[arg-type]
    executor.init_cache(4)
    first, second = executor.submit(StepPlan(step=0, chunks=())), executor.submit(StepPlan(step=1, chunks=()))
    assert (second.result().step, first.result().step) == (1, 0)
    assert second.result() is second.result()
    assert (first.done(), second.done(), executor._steps) == (True, True, 2)
