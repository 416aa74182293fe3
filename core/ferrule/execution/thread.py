"""A worker's own thread, which runs everything in the order of submission.

The thread is what lets `submit` return at once, so that with two steps in flight the host plans while the device works.
Where the device computes apart from the host, a step is begun when its turn comes and ended when its result is asked
for: the launches of the step behind it are queued before anybody waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

from ferrule.errors import EngineDead
from ferrule.execution.worker import Worker
from ferrule.interfaces.executor import Step
from ferrule.types import ModelInfo, Need, StepPlan, StepResult

P = ParamSpec("P")
T = TypeVar("T")
_STOP_SECONDS = 5.0
_PAUSE_SECONDS = 0.2  # without a job after the start, before it is settled: other processes may still be starting


class ThreadStep(Step):
    """A step that the thread begins when its turn comes. `end` is called when `done` or `result` is first called."""

    def __init__(self, end: Callable[[], Future[StepResult]]) -> None:
        self._ended = cache(end)

    def done(self) -> bool:
        return self._ended().done()

    def result(self) -> StepResult:
        return self._ended().result()


@dataclass(frozen=True)
class Job:
    """A call for the thread, and where its outcome goes."""

    future: Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]

    def run(self) -> None:
        try:
            self.future.set_result(self.function(*self.args))
        except BaseException as error:
            self.future.set_exception(error)


class WorkerThread:
    """A worker behind the calls of an executor, which any thread may make.

    After a step has failed, nothing else runs: every later call raises EngineDead.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker: Worker | None = worker  # None: it has stopped, and its memory is free
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ferrule-worker", daemon=True)
        self._unsettled: Worker | None = None  # from the start until it is settled, or another job comes
        self._fault: BaseException | None = None
        self._thread.start()  # a platform may bind the thread that prepares it

    def check(self) -> ModelInfo:
        """Return what `start` would, or raise the StartupError that it would raise before it loads weights; then shut
        down.
        """
        try:
            return self._submit(self._ready().check_start).result()
        finally:
            self.shutdown()

    def start(self) -> ModelInfo:
        """Load the model. Raises StartupError, and has shut down then."""
        try:
            return self._submit(self._ready().start).result()
        except BaseException:
            self.shutdown()
            raise

    def init_cache(self, num_blocks: int) -> None:
        """Allocate the cache and warm up. What the start has put off is done while no other call comes."""
        worker = self._ready()
        self._submit(worker.init_cache, num_blocks, unsettled=worker).result()

    def submit(self, plan: StepPlan) -> Step:
        """Begin a step when its turn comes, without waiting for it."""
        worker = self._ready()
        if worker.depth == 1:  # the step is computed when it begins
            computed = self._submit(self._guarded, worker.execute, plan)
            return ThreadStep(lambda: computed)
        return ThreadStep(partial(self._end, self._submit(self._guarded, worker.begin, plan)))

    def expect(self, backend: str) -> None:
        """Begin to open this guided decoding backend, without waiting for it."""
        self._ready().grammars.expect(backend)

    def prepare(self, need: Need) -> Future[None]:
        """Load what a request needs, without waiting for it. No step waits for it either."""
        return self._ready().prepare(need)

    def call(self, name: str, args: tuple[Any, ...] = ()) -> Any:
        """Return what one of the worker's `calls` returns, between steps. Raises ValueError for an unknown one."""
        return self._submit(self._ready().call, name, args).result()

    def check_health(self) -> None:
        """Raise EngineDead when a step has failed, or the thread has ended."""
        self._ready()

    def shutdown(self) -> None:
        """End the thread, and free the worker's memory; idempotent, bounded in time."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._jobs.put(None)
            self._thread.join(_STOP_SECONDS)
            worker.close(failed=self._fault is not None or self._thread.is_alive())

    def _end(self, begun: Future[Step]) -> Future[StepResult]:
        """Wait on the thread for a step's result, behind everything that was submitted so far."""
        if self._worker is None:
            raise EngineDead("the worker has stopped")
        return self._submit(self._ended, self._worker, begun)

    def _ended(self, worker: Worker, begun: Future[Step]) -> StepResult:
        """End a step that has begun; raise again what its beginning raised."""
        return self._guarded(worker.end, begun.result())

    def _guarded(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a part of a step; what it raises is the end of this worker."""
        self.check_health()
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            self._fault = error
            raise

    def _ready(self) -> Worker:
        worker = self._worker
        if self._fault is not None:
            raise EngineDead(f"a step failed: {type(self._fault).__name__}: {self._fault}")
        if worker is None or not self._thread.is_alive():
            raise EngineDead("the worker has stopped")
        return worker

    def _submit(self, function: Callable[..., T], *args: Any, unsettled: Worker | None = None) -> Future[T]:
        future: Future[T] = Future()
        self._unsettled = unsettled
        self._jobs.put(Job(future, function, args))
        return future

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.run()

    def _next(self) -> Job | None:
        """Return the next job. While none comes after the start, this is a part of the work that the start has put
        off.
        """
        worker = self._unsettled
        if worker is None:
            return self._jobs.get()
        try:
            return self._jobs.get(timeout=_PAUSE_SECONDS)
        except queue.Empty:
            return Job(Future(), self._settle, (worker,))

    def _settle(self, worker: Worker) -> None:
        more = False
        try:
            more = self._guarded(worker.settle)
        finally:
            if not more:
                self._unsettled = None
