"""An executor for one device, which says at its end how much it computed."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from ferrule.config import WorkerSettings
from ferrule.errors import EngineDead
from ferrule.execution import WorkerThread, open_worker
from ferrule.interfaces.executor import Executor, Step
from ferrule.interfaces.plugins import Plugins
from ferrule.log import Log
from ferrule.types import CompiledGrammar, ModelInfo, StepPlan

_log = Log("example")


class ExampleExecutor(Executor):
    """A worker in this process, on a thread of its own, which loads the model and runs its steps.

    It may also be in another one. Then this class sends `config` and `plugins` there, and each plan; msgspec encodes
    them. What gets them makes the `WorkerThread`, calls its methods, and sends back what they return.
    """

    def __init__(self) -> None:
        self._thread: WorkerThread | None = None
        self._steps = self._tokens = 0

    def check(self, config: WorkerSettings, plugins: Plugins) -> None:
        WorkerThread(open_worker(config, plugins)).check()

    def start(self, config: WorkerSettings, plugins: Plugins) -> ModelInfo:
        self._thread = WorkerThread(open_worker(config, plugins))
        return self._thread.start()

    def init_cache(self, num_blocks: int) -> None:
        self._started().init_cache(num_blocks)

    def submit(self, plan: StepPlan) -> Step:
        step = self._started().submit(plan)
        self._steps += 1
        self._tokens += plan.num_tokens
        return step

    def expect(self, backend: str) -> None:
        self._started().expect(backend)

    def prepare(self, grammar: CompiledGrammar) -> Future[None]:
        return self._started().prepare(grammar)

    def call(self, name: str, args: tuple[Any, ...] = ()) -> Any:
        answer = self._started().call(name, args)
        return [answer] if name == "collective_rpc" else answer  # one for each worker

    def check_health(self) -> None:
        self._started().check_health()

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if self._steps:
            _log.info("steps were run", steps=self._steps, tokens=self._tokens)
            self._steps = 0

    def _started(self) -> WorkerThread:
        if self._thread is None:
            raise EngineDead("the executor is not started")
        return self._thread
