"""The executor for one device in this process: one thread runs everything, in the order of submission.

The thread is what lets `submit` return at once, so that with two steps in flight the host plans while the device works.
Where the device computes apart from the host, a step is begun when its turn comes and ended when its result is asked
for: the launches of the step behind it are queued before anybody waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ferrule.config import Resolved
from ferrule.errors import EngineDead
from ferrule.interfaces.executor import Executor, StepHandle
from ferrule.interfaces.plugins import Plugins
from ferrule.types import ModelInfo, StepPlan, StepResult
from ferrule_plugins.executor.device import Worker
from ferrule_plugins.executor.worker import open_worker

T = TypeVar("T")
_STOP_SECONDS = 5.0


class PendingStep:
    """A step that was submitted. Whoever asks for its result, or whether it is there, has the thread wait for it."""

    def __init__(self, executor: UniExecutor, begun: Future[Callable[[], StepResult]]) -> None:
        self._executor = executor
        self._begun = begun
        self._ended: Future[StepResult] | None = None

    def done(self) -> bool:
        return self._end().done()

    def result(self) -> StepResult:
        return self._end().result()

    def _end(self) -> Future[StepResult]:
        if self._ended is None:
            self._ended = self._executor.end(self._begun)
        return self._ended


class UniExecutor(Executor):
    """After a step has failed, nothing else runs: every later call raises EngineDead."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ferrule-worker", daemon=True)
        self._worker: Worker | None = None
        self._fault: BaseException | None = None
        self._stopped = False

    def start(self, config: Resolved, plugins: Plugins) -> ModelInfo:
        self._worker = worker = open_worker(config, plugins)
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
        if worker.platform.depth() == 1:  # the step is computed when it begins
            return self._submit(lambda: self._guarded(lambda: worker.execute(plan)))
        return PendingStep(self, self._submit(lambda: self._guarded(lambda: worker.begin(plan))))

    def end(self, begun: Future[Callable[[], StepResult]]) -> Future[StepResult]:
        """Wait for a step's result behind all that was submitted so far. What `begun` raised is raised again."""
        if self._stopped:
            raise EngineDead("the worker has stopped")
        return self._submit(lambda: self._guarded(begun.result()))

    def call(self, name: str, args: tuple[Any, ...] = ()) -> Any:
        worker = self._ready()
        answer = self._submit(lambda: worker.call(name, args)).result()
        return [answer] if name == "collective_rpc" else answer

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

    def _guarded(self, function: Callable[[], T]) -> T:
        """Run a part of a step; what it raises is the end of this executor."""
        self.check_health()
        try:
            return function()
        except BaseException as error:
            self._fault = error
            raise

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
