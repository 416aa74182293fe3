"""The executor for one device in this process."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ferrule.config import WorkerSettings
from ferrule.errors import EngineDead
from ferrule.execution import WorkerThread, open_worker
from ferrule.interfaces.executor import Executor, Step
from ferrule.interfaces.plugins import Plugins
from ferrule.types import ModelInfo, Need, StepPlan
from ferrule_plugins.executor.step_tracks import StepTracks


class UniExecutor(Executor):
    """An executor with a worker on a thread of its own."""

    def __init__(self) -> None:
        self._worker: WorkerThread | None = None
        self._profiles = Path()  # folder
        self._tracks: StepTracks | None = None  # while a profile is recorded

    def check(self, config: WorkerSettings, plugins: Plugins) -> ModelInfo | None:
        return WorkerThread(open_worker(config, plugins)).check()

    def start(self, config: WorkerSettings, plugins: Plugins) -> ModelInfo:
        self._worker = WorkerThread(open_worker(config, plugins))
        self._profiles = Path(config.env.torch_profiler_dir or "")
        return self._worker.start()

    def init_cache(self, num_blocks: int) -> None:
        self._started().init_cache(num_blocks)

    def submit(self, plan: StepPlan) -> Step:
        step = self._started().submit(plan)
        return step if self._tracks is None else self._tracks.follow(plan, step)

    def expect(self, backend: str) -> None:
        self._started().expect(backend)

    def prepare(self, need: Need) -> Future[None]:
        return self._started().prepare(need)

    def call(self, name: str, args: tuple[Any, ...] = ()) -> Any:
        tracks = self._tracks
        if name == "stop_profile":
            self._tracks = None  # also if the trace cannot be written
        answer = self._started().call(name, args)
        if name == "start_profile":
            self._tracks = StepTracks()
        elif name == "stop_profile" and tracks is not None:
            tracks.write(self._profiles / answer)
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
