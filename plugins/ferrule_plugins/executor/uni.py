"""The executor for one device in this process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from ferrule.config import WorkerSettings
from ferrule.errors import EngineDead
from ferrule.execution import WorkerThread, open_worker
from ferrule.interfaces.executor import Executor, Step
from ferrule.interfaces.plugins import Plugins
from ferrule.types import ModelInfo, Need, StepPlan


class UniExecutor(Executor):
    """An executor with a worker on a thread of its own."""

    def __init__(self) -> None:
        self._worker: WorkerThread | None = None

    def check(self, config: WorkerSettings, plugins: Plugins) -> None:
        WorkerThread(open_worker(config, plugins)).check()

    def start(self, config: WorkerSettings, plugins: Plugins) -> ModelInfo:
        self._worker = WorkerThread(open_worker(config, plugins))
        return self._worker.start()

    def init_cache(self, num_blocks: int) -> None:
        self._started().init_cache(num_blocks)

    def submit(self, plan: StepPlan) -> Step:
        return self._started().submit(plan)

    def expect(self, backend: str) -> None:
        self._started().expect(backend)

    def prepare(self, need: Need) -> Future[None]:
        return self._started().prepare(need)

    def call(self, name: str, args: tuple[Any, ...] = ()) -> Any:
        answer = self._started().call(name, args)
        return [answer] if name == "collective_rpc" else answer

    def check_health(self) -> None:
        self._started().check_health()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()

    def _started(self) -> WorkerThread:
        if self._worker is None:
            raise EngineDead("the executor is not started")
        return self._worker
