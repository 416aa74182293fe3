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
        self.num_slots = rng.randint(1, 3)
        self.preparing = preparing_cls(self._begin, self.num_slots)
        self.wanting: dict[str, EngineRequest] = {}
        self.num_prepared = 0
        self._oldest = ""  # the request that waits for a slot, with no other before it
        self._before: frozenset[str] = frozenset()  # those that waited when it became that
        self._passed: set[int] = set()  # slots that were given to requests that came since then

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
            self._note_passing(request)
            yield request
        there, loading = self._in_slots()
        claimed = False  # an older request waits for a slot, maybe for the one that this adapter is in
        for id, request in self.wanting.items():
            name = "" if request.adapter is None else request.adapter.name
            if name not in there and name not in loading:
                claimed = True
                self._note_oldest(id)
            if name in there and not claimed:
                raise Violation(f"I22: {id} waits although its adapter is loaded")

    def _in_slots(self) -> tuple[set[str], set[str]]:
        """Return the names of the adapters that are in slots, and of those that are being loaded into one."""
        loading = {need.slot: need.adapter.name for need, _ in self._begun}
        there = {name for slot, name in self._device.adapters.items() if slot not in loading}
        return there, {*loading.values()}

    def _note_oldest(self, id: str) -> None:
        if id == next(iter(self.wanting)) != self._oldest:
            self._oldest, self._before, self._passed = id, frozenset(self.wanting), set()

    def _note_passing(self, given: EngineRequest) -> None:
        """Note a slot that was given past the oldest request. Raises Violation once that is true of every slot.

        One whose adapter is being loaded has its slot.
        """
        oldest = self.wanting.get(self._oldest)
        if oldest is None or oldest.adapter is None or any(oldest.adapter.name in names for names in self._in_slots()):
            return
        if given.id not in self._before:
            self._passed.add(given.adapter_slot)
            if len(self._passed) == self.num_slots:
                raise Violation(f"I22: later requests were given every slot, and {self._oldest} still waits for one")

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
