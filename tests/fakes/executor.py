"""An executor without a model: plans run on a `FakeDevice`, and have ended when they were submitted."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ferrule.errors import EngineDead
from ferrule.interfaces.executor import Executor, Step
from ferrule.types import AdapterLoad, CacheGroup, ModelInfo, Need, StepPlan, StepResult
from ferrule_testkit.fakes import FakeDevice, FakeModel, Fault

if TYPE_CHECKING:
    from ferrule.config import WorkerSettings
    from ferrule.interfaces.plugins import Plugins


class EndedStep(Step):
    """A step that has ended: with a result, or with the fault that it raises."""

    def __init__(self, result: StepResult | EngineDead) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        if isinstance(self._result, EngineDead):
            raise self._result
        return self._result


class FakeExecutor(Executor):
    """An executor on a `FakeDevice`. `break_at` is the number of the step that the device does not survive; 0: none."""

    def __init__(
        self, groups: tuple[CacheGroup, ...], vocab_size: int = 32, break_at: int = 0, num_snapshots: int = 0
    ) -> None:
        self.model = FakeModel(groups, vocab_size)
        self.plans: list[StepPlan] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.alive = True
        self.device: FakeDevice | None = None
        self._break_at = break_at
        self._num_snapshots = num_snapshots

    def start(self, config: WorkerSettings, plugins: Plugins) -> ModelInfo:
        return ModelInfo(
            architecture="Fake",
            implementation="ferrule_testkit",
            vocab_size=self.model.vocab_size,
            max_model_len=64,
            dtype="float32",
            device="none",
            attention="none",
            groups=self.model.all_groups,
            page_bytes=1,
            max_blocks=128,
            max_snapshots=self._num_snapshots,
            tasks=("generate", "embed") if self.model.all_groups else ("embed",),
            splits_prompts=bool(self.model.all_groups),
            adapter_slots=2,
        )

    def init_cache(self, num_blocks: int) -> None:
        self.device = FakeDevice(self.model, num_blocks, num_snapshots=self._num_snapshots)

    def submit(self, plan: StepPlan) -> Step:
        if self.device is None:
            raise Fault("a step before init_cache")
        self.plans.append(plan)
        if 0 < self._break_at <= len(self.plans):
            self.alive = False
            return EndedStep(EngineDead("the fake device broke"))
        return EndedStep(self.device.run(plan))

    def prepare(self, need: Need) -> Future[None]:
        """Load an adapter at once; there are no constraints."""
        if self.device is None or not isinstance(need, AdapterLoad):
            return super().prepare(need)
        self.device.load(need)
        loaded: Future[None] = Future()
        loaded.set_result(None)
        return loaded

    def call(self, name: str, args: tuple[Any, ...] = ()) -> Any:
        self.calls.append((name, args))
        if name == "restore" and "kv_cache" in args and self.device is not None:
            self.init_cache(self.device.num_blocks)
        return len(self.calls)

    def check_health(self) -> None:
        if not self.alive:
            raise EngineDead("the fake device broke")

    def shutdown(self) -> None:
        self.alive = False
