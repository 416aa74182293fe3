"""The executor's health is asked for on a thread of its own; what it answers ends the loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ferrule.assembly.health import HealthWatch
from ferrule.errors import EngineDead


class Watched:
    """A loop and an executor whose worker dies at the second question."""

    def __init__(self, fault: Exception | None) -> None:
        self.fault = fault
        self.asked = 0
        self.failed: list[Exception] = []
        self.stuck = threading.Event()
        self.again = threading.Event()
        self.watch = HealthWatch(self, self, seconds=0.0, patience=0.0)  # type: ignore[arg-type]

    def check_health(self) -> None:
        self.asked += 1
        if self.asked == 3:
            self.again.set()
        if self.asked > 1 and self.fault is not None:
            raise self.fault

    def fail(self, error: Exception) -> None:
        self.failed.append(error)


@pytest.mark.parametrize("fault", [EngineDead("a worker is gone"), ConnectionError("reset")])
def test_what_the_check_raises_ends_the_loop_and_then_the_engine(fault: Exception) -> None:
    watched = Watched(fault)
    watched.watch.begin(watched.stuck.set)
    assert watched.stuck.wait(30)
    assert watched.failed == [fault]
    assert watched.asked == 2


def test_a_healthy_executor_is_asked_again_and_again_until_the_end() -> None:
    watched = Watched(None)
    watched.watch.begin(watched.stuck.set)
    assert watched.again.wait(30)
    watched.watch.end()
    assert not watched.failed
    assert not watched.stuck.is_set()


def test_what_is_answered_after_the_end_does_not_count() -> None:
    watched = Watched(EngineDead("it was shut down"))
    answered = threading.Event()

    def check_health() -> None:  # the executor is being shut down while it answers
        watched.watch.end()
        answered.set()
        raise EngineDead("it was shut down")

    executor: Any = watched
    executor.check_health = check_health
    watched.watch.begin(watched.stuck.set)
    assert answered.wait(30)
    for thread in threading.enumerate():
        if thread.name == "health":
            thread.join(30)
    assert not watched.failed
