"""`executor`: who runs the plans. Entry point name = what `--distributed-executor-backend` takes.

What runs a model on a device is core: `ferrule.execution.WorkerThread` has the methods of an executor. An executor says
in which process or machine it is, and carries plans there and results back.

`WorkerSettings` are the sections of the configuration that load and run a model. API keys and the hub's token are not
among them, and msgspec encodes them for a worker elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ferrule.errors import RequestError
from ferrule.types import CompiledGrammar, ModelInfo, Need, StepPlan, StepResult

if TYPE_CHECKING:
    from ferrule.config import WorkerSettings
    from ferrule.interfaces.plugins import Plugins


class Step(ABC):
    """A step that was submitted, to wait for its result. `result` may be called more than once."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether `result` would not block."""

    @abstractmethod
    def result(self) -> StepResult:
        """Block until the step has ended. Raises what the step raised: a device fault, fatal."""


class Executor(ABC):
    """A device, or several, that execute plans in the order of submission."""

    runs_model = True  # False: plugins of the device and the model (sampler, attention backend, …) are not imported

    def check(self, config: WorkerSettings, plugins: Plugins) -> ModelInfo | None:
        """Raise the StartupError that `start` would raise before it loads weights, as far as it can be known.

        For `--dry-run`; `start` is not called afterwards. The model is a local folder. Returns what `start` would, or
        None where that is not known: then less is checked.
        """
        return None

    @abstractmethod
    def start(self, config: WorkerSettings, plugins: Plugins) -> ModelInfo:
        """Load the model. Raises StartupError."""

    @abstractmethod
    def init_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache and warm up."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> Step:
        """Begin a step, without waiting for its end."""

    def expect(self, backend: str) -> None:
        """Begin to open this guided decoding backend on every worker, because a first constraint is being compiled.

        Does not wait, and reports no failure: `prepare` opens the backend again, and reports it. By default only
        `prepare` opens backends.
        """

    def prepare(self, need: Need) -> Future[None]:
        """Load what a request needs on every worker, without waiting for it: a constraint, or an adapter into its slot.

        The loop queues the request when the future is done. Its exception ends the request. What is loaded into one
        slot is loaded in the order of the calls. The default has neither guided decoding nor adapters.
        """
        refused: Future[None] = Future()
        what = "guided decoding" if isinstance(need, CompiledGrammar) else "adapters"
        refused.set_exception(RequestError(f"{type(self).__name__} has no {what}."))
        return refused

    @abstractmethod
    def call(self, name: str, args: tuple[Any, ...] = ()) -> Any:
        """Run a named method on every worker between steps; returns the first worker's answer.

        `collective_rpc` returns a list with each worker's. Raises ValueError for an unknown method.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDead when a worker is gone or stuck. Whatever is raised ends the engine.

        Called about once a second on a thread of its own, also while steps run, and not once `shutdown` was called. An
        answer may take its time: no step waits for it.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Stop; idempotent, bounded in time."""
