"""The end of a worker, and its sleep."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from ferrule.execution.worker import Worker


class Runner:
    """A runner that refers to itself, as parts of a model may."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize(
    ("own_memory", "failed", "calls"),
    [(True, False, ["grammars", "trim"]), (True, True, ["grammars"]), (False, False, ["grammars"])],
)
def test_a_device_that_works_gets_its_memory_back(own_memory: bool, failed: bool, calls: list[str]) -> None:
    seen: list[str] = []
    worker: Any = Worker.__new__(Worker)
    runner = Runner()
    alive = weakref.ref(runner)
    worker._runner, worker._shortage, worker._asleep = runner, SimpleNamespace(runner=runner), None
    del runner
    worker.grammars = SimpleNamespace(close=lambda: seen.append("grammars"))
    worker._loader = SimpleNamespace(shutdown=lambda **how: None)

    def trim() -> None:
        assert alive() is None
        seen.append("trim")

    memory = SimpleNamespace(trim=trim)
    worker.platform, worker._own_memory = SimpleNamespace(memory=lambda: memory), own_memory
    worker.close(failed)
    assert seen == calls


def test_a_worker_that_never_started_closes() -> None:
    worker: Any = Worker.__new__(Worker)
    worker._runner = None
    worker.close()


def test_weights_stay_until_adapters_have_been_loaded() -> None:
    worker: Any = Worker.__new__(Worker)
    with ThreadPoolExecutor(1) as worker._loader:
        seen: list[str] = []
        begun, go_on = threading.Event(), threading.Event()

        def load() -> None:
            begun.set()
            go_on.wait(10)
            seen.append("loaded")

        worker._loader.submit(load)
        worker._missing, worker._own_memory = set(), False
        worker._runner = SimpleNamespace(use=lambda model: seen.append("weights are given back"))
        worker.platform = SimpleNamespace(memory=lambda: SimpleNamespace(trim=lambda: None))
        assert begun.wait(10)
        with ThreadPoolExecutor(1) as other:
            released = other.submit(worker.release, ("weights",), 1)
            go_on.set()
            released.result()
    assert seen == ["loaded", "weights are given back"]
