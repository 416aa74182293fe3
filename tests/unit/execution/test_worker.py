"""The end of a worker, and its sleep."""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ferrule.execution.worker import Worker
from ferrule.interfaces.adapters import AdaptedLayer, AdapterBank, BankContext
from ferrule.types import Adapter, AdapterLoad


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


class SlowBank(AdapterBank):
    """A bank that does nothing until the adapter's gate is open. `seen` has what began and ended."""

    def __init__(self) -> None:
        super().__init__(
            BankContext(num_slots=1, max_rank=1, max_host=1, dtype=torch.float32, device=torch.device("cpu"))
        )
        self.gates: dict[str, threading.Event] = defaultdict(threading.Event)
        self.seen: list[str] = []

    def layer(self, layer: AdaptedLayer) -> None:
        return None

    def read(self, adapter: Adapter) -> None:
        self.seen.append(f"begun {adapter.name}")
        assert self.gates[adapter.name].wait(10)
        self.seen.append(adapter.name)

    def load(self, slot: int, adapter: Adapter) -> None:
        self.read(adapter)


class SlowBanks(SlowBank):
    concurrent = True


@pytest.fixture
def worker() -> Iterator[Any]:
    made: Any = Worker.__new__(Worker)
    made._missing, made._own_memory, made._slot_loads = set(), False, {}
    made.platform = SimpleNamespace(memory=lambda: SimpleNamespace(trim=lambda: None))
    with ThreadPoolExecutor(4) as made._loader:
        yield made


def need(name: str, slot: int = 0) -> AdapterLoad:
    return AdapterLoad(adapter=Adapter(name=name), slot=slot)


def test_weights_stay_while_a_load_may_read_them(worker: Any) -> None:
    bank = worker._adapters = SlowBank()
    worker._runner = SimpleNamespace(use=lambda model: bank.seen.append("weights are given back"))
    loading = worker.prepare(need("x"))
    while not bank.seen:
        time.sleep(0.001)
    with ThreadPoolExecutor(1) as other:
        released = other.submit(worker.release, ("weights",), 1)
        assert not wait((released,), 0.05).done
        bank.gates["x"].set()
        released.result(10)
    loading.result(10)
    assert bank.seen == ["begun x", "x", "weights are given back"]


def test_a_slow_load_holds_up_others_only_in_a_bank_for_one_thread(worker: Any) -> None:
    for bank, beside in ((SlowBanks(), True), (SlowBank(), False)):
        worker._adapters = bank
        bank.gates["quick"].set()
        slow, quick = worker.prepare(need("slow")), worker.prepare(need("quick", 1))
        assert bool(wait((quick,), 10 if beside else 0.05).done) == beside
        bank.gates["slow"].set()
        slow.result(10)
        quick.result(10)


def test_loads_into_one_slot_end_in_their_order(worker: Any) -> None:
    bank = worker._adapters = SlowBanks()
    for name in ("b", "other"):
        bank.gates[name].set()
    first, second, third = (worker.prepare(each) for each in (need("a", 1), need("b", 1), need("other", 2)))
    third.result(10)
    assert not wait((second,), 0.05).done
    bank.gates["a"].set()
    first.result(10)
    second.result(10)
    assert [name for name in bank.seen if name in "ab"] == ["a", "b"]


def test_what_follows_the_weights_is_computed_again_when_they_were_read_again(worker: Any) -> None:
    bank = worker._adapters = SlowBanks()
    bank.follow_model = lambda: bank.seen.append("followed")
    worker._runner = SimpleNamespace(use=lambda *models: bank.seen.append("used"))
    worker._missing = {"kv_cache"}
    worker.platform = SimpleNamespace(memory=lambda: SimpleNamespace(guard=lambda what: nullcontext()))
    worker._weights = lambda: ("model", None)
    for asleep, seen in ((None, ["used", "followed"]), (("kept",), ["used"])):
        worker._asleep = asleep
        worker.restore("weights")
        assert bank.seen == seen
        bank.seen.clear()
