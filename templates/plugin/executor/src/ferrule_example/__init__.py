"""The built-in executor for one device, which measures its steps."""

from __future__ import annotations

import time
from concurrent.futures import Future

from ferrule.interfaces.executor import StepHandle
from ferrule.log import Log
from ferrule.types import StepPlan
from ferrule_plugins.executor.uni import UniExecutor

_log = Log("example")


class ExampleExecutor(UniExecutor):
    def __init__(self) -> None:
        super().__init__()
        self._steps = 0
        self._slowest = 0.0  # seconds from a step's submission to its end

    def submit(self, plan: StepPlan) -> StepHandle:
        began = time.monotonic()

        def ended(step: Future[object]) -> None:
            self._steps += 1
            self._slowest = max(self._slowest, time.monotonic() - began)

        handle = super().submit(plan)
        if isinstance(handle, Future):
            handle.add_done_callback(ended)
        return handle

    def shutdown(self) -> None:
        super().shutdown()
        if self._steps:
            _log.info("steps were run", steps=self._steps, slowest=round(self._slowest, 4))
            self._steps = 0
