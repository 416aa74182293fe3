"""Steps for which there is no memory: who fails, who goes on, and what is given up."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ferrule.errors import StepTooLarge
from ferrule.execution.shortage import Shortage
from ferrule.interfaces.executor import Step
from ferrule.interfaces.platform import DeviceMemory
from ferrule.runner.model_runner import ModelRunner
from ferrule.types import Chunk, FinishReason, RowResult, StepPlan, StepResult
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness


@dataclass
class Done(Step):
    rows: tuple[RowResult, ...]

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return StepResult(7, self.rows)


@dataclass
class States:
    request_bytes: int


@dataclass
class Small:
    """A runner and the memory of its device, which has room for `room` tokens, and a clock."""

    room: int
    now: float = 100.0
    recurrent: States = field(default_factory=lambda: States(0))
    tried: list[int] = field(default_factory=list)  # rows of each attempt
    applied: int = 0
    trimmed: int = 0

    def shortage(self) -> Shortage:
        return Shortage(cast(ModelRunner, self), cast(DeviceMemory, self), lambda: self.now)

    def guard(self, stage: str) -> AbstractContextManager[None]:
        return nullcontext()

    def apply(self, plan: StepPlan) -> None:
        self.applied += 1

    def compute(self, plan: StepPlan) -> Step:
        self.tried.append(len(plan.chunks))
        if sum(chunk.count for chunk in plan.chunks) > self.room:
            raise StepTooLarge("too large")
        return Done(
            tuple(RowResult(id=chunk.id, epoch=chunk.epoch, token_ids=(int(chunk.id),)) for chunk in plan.chunks)
        )

    def trim(self) -> None:
        self.trimmed += 1


def plan(*counts: int) -> StepPlan:
    return StepPlan(
        step=7,
        chunks=tuple(
            Chunk(slot=row, id=str(row), epoch=0, start=0, count=count, ends="sample", new_blocks=())
            for row, count in enumerate(counts)
        ),
    )


def failed(step: Step) -> list[str]:
    """Return the ids of rows with an error, after a look at the whole result."""
    result = step.result()
    assert result.step == 7
    assert [row.id for row in result.rows] == [str(number) for number in range(len(result.rows))]
    assert all((row.error is None) == (row.token_ids == (int(row.id),)) for row in result.rows)
    return [row.id for row in result.rows if row.error is not None]


def test_a_step_that_fits_is_left_alone() -> None:
    device = Small(10)
    assert failed(device.shortage().begin(plan(1, 8, 1))) == []
    assert (device.tried, device.trimmed) == ([3], 0)


@pytest.mark.parametrize(
    ("counts", "room", "fails", "tried"),
    [
        ((1, 9, 1), 4, ["1"], [3, 2]),  # the largest
        ((1, 1, 1, 1), 3, ["3"], [4, 3]),  # of equal ones the newest
        ((4, 4, 1, 4, 1), 6, ["1", "3"], [5, 4, 3]),  # twice as many each time
        ((4, 4, 4), 0, ["0", "1", "2"], [3, 2, 1, 0]),
    ],
)
def test_the_largest_and_newest_requests_fail(
    counts: tuple[int, ...], room: int, fails: list[str], tried: list[int]
) -> None:
    device = Small(room)
    assert failed(device.shortage().begin(plan(*counts))) == fails
    assert device.tried == tried
    assert device.trimmed == len(tried) - 1
    assert device.applied == 1


def test_states_that_changed_in_place_fail_all() -> None:
    device = Small(4, recurrent=States(8))
    assert failed(device.shortage().begin(plan(1, 9, 1))) == ["0", "1", "2"]
    assert device.tried == [3, 0]


def test_a_second_shortage_within_a_minute_is_the_end() -> None:
    device = Small(4)
    shortage = device.shortage()
    assert failed(shortage.begin(plan(9, 1))) == ["0"]
    device.now += 61
    assert failed(shortage.begin(plan(9, 1))) == ["0"]
    device.now += 59
    with pytest.raises(StepTooLarge) as caught:
        shortage.begin(plan(9, 1))
    assert len(caught.traceback) == 2  # here and `begin`: the frames of the step are gone, and with them its memory


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_an_engine_lives_on_without_the_request(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Give the others their tokens without a shortage, with attention alone. With states, all fail."""
    tiny_checkpoint(name, tmp_path)
    prompts = [[5, 6, 7], list(range(3, 83)), [9, 8]]
    compute, due = ModelRunner._compute, [True]

    def too_much(self: ModelRunner, ctx: Any) -> torch.Tensor:
        hidden = compute(self, ctx)  # keys and values are written, and the error comes after it
        if len(hidden) > 60 and due:
            due.clear()
            torch.empty(1 << 60, dtype=torch.uint8)
        return hidden

    with Harness(tmp_path, dtype="float32") as harness:
        alone = [harness.engine().run([prompt])[0] for prompt in prompts]
        monkeypatch.setattr(ModelRunner, "_compute", too_much)
        engine = harness.engine()
        together = engine.run(prompts)
        assert "a step got no memory" in caplog.text
        fails = [output.finish is FinishReason.ERROR for output in together]
        assert fails == ([False, True, False] if name == "llama" else [True, True, True])
        assert all("not enough memory" in str(output.error) for output in together if output.error)
        again = engine.run(prompts)
        for one, other in zip([*together, *again], [*alone, *alone], strict=True):
            assert one.finish is FinishReason.ERROR or one.token_ids == other.token_ids
        assert not any(output.error for output in again)
