from types import SimpleNamespace

from ferrule.types import Chunk, StepPlan
from ferrule_example import ExampleExecutor
from ferrule_testkit.kits import ExecutorKit


class TestConformance(ExecutorKit):
    plugin = ExampleExecutor


def test_steps_and_tokens_are_counted() -> None:
    executor = ExampleExecutor()
    executor._thread = SimpleNamespace(submit=lambda plan: plan.step)  # type: ignore[assignment]
    chunk = Chunk(slot=0, id="a", epoch=0, start=0, count=5, ends="sample")
    assert [executor.submit(StepPlan(step=step, chunks=(chunk,) * step)) for step in (1, 2)] == [1, 2]
    assert (executor._steps, executor._tokens) == (2, 15)
