"""The executor for one device in this process: one thread runs everything, in the order of submission.

The thread is what lets `submit` return at once, so that with two steps in flight the host plans while the device works.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ferrule.config import Config
from ferrule.errors import EngineDead
from ferrule.execution.worker import Worker
from ferrule.interfaces.executor import Executor, StepHandle
from ferrule.interfaces.plugins import Plugins
from ferrule.types import ModelInfo, StepPlan, StepResult

T = TypeVar("T")
_STOP_SECONDS = 5.0


class UniExecutor(Executor):
    """After a step has failed, nothing else runs: every later call raises EngineDead."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ferrule-worker", daemon=True)
        self._worker: Worker | None = None
        self._fault: BaseException | None = None
        self._stopped = False

    def start(self, config: Config, plugins: Plugins) -> ModelInfo:
        self._worker = worker = Worker(config, plugins)
        self._thread.start()
        try:
            return self._submit(worker.start).result()
        except BaseException:
            self.shutdown()
            raise

    def init_cache(self, num_blocks: int) -> None:
        worker = self._ready()
        self._submit(lambda: worker.init_cache(num_blocks)).result()

    def submit(self, plan: StepPlan) -> StepHandle:
        worker = self._ready()

        def step() -> StepResult:
            self.check_health()
            try:
                return worker.execute(plan)
            except BaseException as error:
                self._fault = error
                raise

        return self._submit(step)

    def call(self, name: str, args: tuple[Any, ...] = ()) -> Any:
        worker = self._ready()
        return self._submit(lambda: worker.call(name, args)).result()

    def check_health(self) -> None:
        if self._fault is not None:
            raise EngineDead(f"a step failed: {type(self._fault).__name__}: {self._fault}")
        if self._stopped or not self._thread.is_alive():
            raise EngineDead("the worker has stopped")

    def shutdown(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        self._worker = None

    def _ready(self) -> Worker:
        if self._worker is None:
            raise EngineDead("the executor is not started")
        self.check_health()
        return self._worker

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
