"""The built-in executor for one device, which measures its steps."""

from __future__ import annotations

import time

from ferrule.interfaces.executor import Step
from ferrule.log import Log
from ferrule.types import StepPlan, StepResult
from ferrule_plugins.executor.uni import UniExecutor

_log = Log("example")


class TimedStep(Step):
    """A step that tells the executor how long it took, once."""

    def __init__(self, step: Step, executor: ExampleExecutor) -> None:
        self._step = step
        self._executor = executor
        self._began: float | None = time.monotonic()

    def done(self) -> bool:
        return self._step.done()

    def result(self) -> StepResult:
        result = self._step.result()
        if self._began is not None:
            self._executor.ended(time.monotonic() - self._began)
            self._began = None
        return result


class ExampleExecutor(UniExecutor):
    def __init__(self) -> None:
        super().__init__()
        self._steps = 0
        self._slowest = 0.0  # seconds from a step's submission to when its result was there

    def submit(self, plan: StepPlan) -> Step:
        return TimedStep(super().submit(plan), self)

    def ended(self, seconds: float) -> None:
        self._steps += 1
        self._slowest = max(self._slowest, seconds)

    def shutdown(self) -> None:
        super().shutdown()
        if self._steps:
            _log.info("steps were run", steps=self._steps, slowest=round(self._slowest, 4))
            self._steps = 0
