"""Adapters that load late: what the loop does for requests before it queues them, in the simulator."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from ferrule.engine.preparing import Preparing
from ferrule.types import Adapter, AdapterLoad, EngineRequest, Need
from ferrule_testkit.fakes import FakeDevice
from ferrule_testkit.simulate_ledger import Violation


class Loads:
    """Adapters that are being loaded to a device with 1 to 3 slots, and `wanting`, the requests that wait for them."""

    def __init__(self, device: FakeDevice, rng: random.Random, preparing_cls: type[Preparing]) -> None:
        self._device = device
        self._rng = rng
        self._begun: deque[tuple[AdapterLoad, Future[None]]] = deque()
        self.late = rng.choice((0.0, 0.5, 0.95))  # chance that what is being loaded is not there in a step
        self.preparing = preparing_cls(self._begin, rng.randint(1, 3))
        self.wanting: dict[str, EngineRequest] = {}
        self.num_prepared = 0

    def draw(self) -> Adapter:
        return Adapter(name=self._rng.choice(("a", "b", "c", "")))

    def add(self, request: EngineRequest) -> None:
        self.wanting[request.id] = request
        self.preparing.add(request)

    def cancel(self, ids: list[str]) -> None:
        for request in self.preparing.cancel(ids):
            del self.wanting[request.id]

    def turn(self) -> Iterator[EngineRequest]:
        """Load what was begun, or some of it. Gives the requests that can be queued; raises Violation for others that
        could be.
        """
        while self._begun and self._rng.random() >= self.late:
            need, future = self._begun.popleft()
            self._device.load(need)
            future.set_result(None)
        for request, error in self.preparing.take():
            if error is not None:
                raise Violation(f"I22: {request.id} could not be prepared: {error}")
            self.num_prepared += 1
            del self.wanting[request.id]
            yield request
        loading = {need.slot for need, _ in self._begun}
        there = {name for slot, name in self._device.adapters.items() if slot not in loading}
        for id, request in self.wanting.items():
            if request.adapter is not None and request.adapter.name in there:
                raise Violation(f"I22: {id} waits although its adapter is loaded")

    def check_drained(self, running: bool) -> None:
        """Raise Violation where requests wait for a slot that nobody uses. `running`: some requests are not over."""
        if self.wanting and not (running or self._begun):
            raise Violation(f"I22: {sorted(self.wanting)} wait for an adapter slot, and nobody uses one")

    def _begin(self, need: Need) -> Future[None]:
        future: Future[None] = Future()
        if not isinstance(need, AdapterLoad):
            raise Violation(f"I22: {need} is to be loaded, and nobody asked for it")
        self._begun.append((need, future))
        return future
