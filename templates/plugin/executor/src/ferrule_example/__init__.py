"""An executor around another one, which measures steps from their submission until their results are there."""

from __future__ import annotations

import time
from typing import Any

from ferrule.config import Config
from ferrule.errors import EngineDead
from ferrule.interfaces.executor import Executor, Step
from ferrule.interfaces.plugins import Plugins
from ferrule.log import Log
from ferrule.types import ModelInfo, StepPlan, StepResult

_log = Log("example")


class TimedStep(Step):
    """A step that tells the executor how long it took, once. Several may be in flight."""

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


class ExampleExecutor(Executor):
    """Everything is done by `uni`, the executor for one device."""

    def __init__(self) -> None:
        self._inner: Executor | None = None
        self._steps = 0
        self._slowest = 0.0  # seconds from a step's submission to when its result was there

    def start(self, config: Config, plugins: Plugins) -> ModelInfo:
        inner: Executor = plugins.make("executor", "uni")
        info = inner.start(config, plugins)
        self._inner = inner
        return info

    def init_cache(self, num_blocks: int) -> None:
        self._started().init_cache(num_blocks)

    def submit(self, plan: StepPlan) -> Step:
        return TimedStep(self._started().submit(plan), self)

    def ended(self, seconds: float) -> None:
        self._steps += 1
        self._slowest = max(self._slowest, seconds)

    def call(self, name: str, args: tuple[Any, ...] = ()) -> Any:
        return self._started().call(name, args)

    def check_health(self) -> None:
        self._started().check_health()

    def shutdown(self) -> None:
        if self._inner is not None:
            self._inner.shutdown()
        if self._steps:
            _log.info("steps were run", steps=self._steps, slowest=round(self._slowest, 4))
            self._steps = 0

    def _started(self) -> Executor:
        if self._inner is None:
            raise EngineDead("the executor is not started")
        return self._inner
