"""A runner that measures its steps, for --collect-detailed-traces.

On a device that computes apart from the host, the end of a forward pass is only known to who waits for it: with `model`
every step waits there, and launches nothing meanwhile. `worker` measures without any such wait.
"""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter

from ferrule.runner.model_runner import Forwarded, ModelRunner, RunnerParts
from ferrule.runner.outcome import Outcome
from ferrule.types import StepPlan, StepSeconds


class TimedRunner(ModelRunner):
    """A runner whose results have `StepSeconds`; with `waits`, also those of the forward pass."""

    def __init__(self, parts: RunnerParts, waits: bool) -> None:
        super().__init__(parts)
        self._waits = waits
        self._forward = 0.0  # seconds, of the step that was begun last

    def compute(self, plan: StepPlan) -> Outcome:
        began, self._forward = perf_counter(), 0.0
        outcome = super().compute(plan)
        forward = self._forward
        outcome.seconds = lambda: StepSeconds(perf_counter() - began, forward)
        return outcome

    def forward(self, plan: StepPlan) -> Forwarded:
        began = perf_counter()
        forwarded = super().forward(plan)
        if self._waits:
            self._transfers.fetch([forwarded.hidden[-1:]]).wait()
            self._forward = perf_counter() - began
        return forwarded


def open_runner(parts: RunnerParts, measured: Collection[str]) -> ModelRunner:
    """Make a runner. `measured` are names of --collect-detailed-traces: model, worker, all."""
    return TimedRunner(parts, not {"model", "all"}.isdisjoint(measured)) if measured else ModelRunner(parts)
