"""A step that does not get the memory that it needs: the requests that ask most of it fail, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ferrule.errors import StepTooLarge
from ferrule.interfaces.executor import Step
from ferrule.interfaces.platform import DeviceMemory
from ferrule.log import Log
from ferrule.runner.model_runner import ModelRunner
from ferrule.types import Chunk, RowResult, StepPlan, StepResult

_APART = 60.0  # seconds: two shortages that are closer mean that the memory is not coming back
_FAILED = "The server had not enough memory to compute this request."
_log = Log("worker")


class Shortage:
    """A starter of a runner's steps. A step that failed for lack of memory is begun again for fewer requests: keys and
    values are written once more, with the same result. States of recurrent layers change in place: with them there is
    no second time.
    """

    def __init__(self, runner: ModelRunner, memory: DeviceMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self._runner, self._memory, self._clock = runner, memory, clock
        self._last: float | None = None

    def begin(self, plan: StepPlan) -> Step:
        """Begin a step for all chunks of the plan. Chunks that do not fit into memory get an error.

        Raises StepTooLarge for a second shortage within a minute.
        """
        with self._memory.guard("step"):
            self._runner.apply(plan)
        found, left_out = self._try(plan), 0
        if not isinstance(found, StepTooLarge):
            return found
        now, last = self._clock(), self._last
        self._last = now
        if last is not None and now - last < _APART:
            raise found
        kept: Sequence[Chunk] = plan.chunks
        while isinstance(found, StepTooLarge):
            left_out = max(1, 2 * left_out)
            kept = _lightest(plan.chunks, 0 if self._runner.recurrent.request_bytes else len(plan.chunks) - left_out)
            _log.error("a step got no memory: requests fail", requests=len(plan.chunks) - len(kept), why=str(found))
            self._memory.trim()
            found = self._try(StepPlan(step=plan.step, chunks=tuple(kept)))
        return _Fewer(plan, found, frozenset(chunk.id for chunk in kept))

    def _try(self, plan: StepPlan) -> Step | StepTooLarge:
        """Compute the plan; return the error, if memory is short, without the frames that raised it: they hold the
        memory of what was computed.
        """
        try:
            with self._memory.guard("step"):
                return self._runner.compute(plan)
        except StepTooLarge as error:
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)


def _lightest(chunks: Sequence[Chunk], count: int) -> Sequence[Chunk]:
    """Return `count` of the chunks, in their order: those with the fewest tokens, and of equal ones the older."""
    order = sorted(range(len(chunks)), key=lambda place: (chunks[place].count, place))
    return [chunks[place] for place in sorted(order[: max(0, count)])]


@dataclass(frozen=True)
class _Fewer(Step):
    """The step of a whole plan, of which only the chunks of `kept` were computed."""

    plan: StepPlan
    computed: Step
    kept: frozenset[str]

    def done(self) -> bool:
        return self.computed.done()

    def result(self) -> StepResult:
        computed = self.computed.result()
        rows = iter(computed.rows)
        return StepResult(
            self.plan.step,
            tuple(
                next(rows) if chunk.id in self.kept else RowResult(id=chunk.id, epoch=chunk.epoch, error=_FAILED)
                for chunk in self.plan.chunks
            ),
            computed.seconds,
        )
