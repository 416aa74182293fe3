"""Planted bugs in what is loaded for requests, and in whose adapter a row is computed with."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ferrule.engine.preparing import AdapterSlots, Prepare, Preparing, Waiting
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.types import Adapter, EngineRequest, StepPlan


class AdapterOfTheRowBefore(DefaultScheduler):
    def schedule(self, now: float) -> StepPlan | None:
        plan = super().schedule(now)
        if plan is None or len(plan.admits) < 2:
            return plan
        slots = [admit.adapter_slot for admit in plan.admits]
        turned = zip(plan.admits, [slots[-1], *slots[:-1]], strict=True)
        admits = tuple(msgspec.structs.replace(admit, adapter_slot=slot) for admit, slot in turned)
        return msgspec.structs.replace(plan, admits=admits)


class AdapterForgottenInTheKey(DefaultScheduler):
    def add(self, request: EngineRequest, now: float) -> None:
        super().add(request, now)
        entry = self._requests[request.id]
        entry.chain = self.cache.chain(msgspec.structs.replace(request, adapter=None))


class QueueHeldUp(Preparing):
    def take(self) -> Iterator[tuple[EngineRequest, BaseException | None]]:
        first = next(iter(self._waiting.values()), None)
        if first is None or first.ready or not first.placed:
            yield from super().take()


class QueuedBeforeItIsLoaded(Preparing):
    def _place(self, waiting: Waiting) -> None:
        super()._place(waiting)
        waiting.loads.clear()


class SlotsKeptForEver(Preparing):
    def ended(self, id: str) -> None:
        pass


class SlotTakenWhileInUse(Preparing):
    class Slots(AdapterSlots):
        def _free(self) -> int:
            return super()._free() or self._adapters.pop(next(iter(self._adapters)))

    def __init__(self, prepare: Prepare, num_adapter_slots: int = 0) -> None:
        super().__init__(prepare, num_adapter_slots)
        self._slots = self.Slots(num_adapter_slots)


class LoadedTwiceIntoTwoSlots(Preparing):
    class Slots(AdapterSlots):
        def take(self, id: str, adapter: Adapter) -> tuple[int, bool] | None:
            slot = self._free()
            if slot:
                self._adapters[f"{adapter.name}:{id}"] = self._users[id] = slot
            return (slot, True) if slot else None

    def __init__(self, prepare: Prepare, num_adapter_slots: int = 0) -> None:
        super().__init__(prepare, num_adapter_slots)
        self._slots = self.Slots(num_adapter_slots)


class LoadedAdaptersFirst(Preparing):
    """Requests whose adapter is loaded pass those that wait for a slot, which may wait for ever."""

    class Slots(AdapterSlots):
        def _claim(self, name: str) -> None:
            pass

    def __init__(self, prepare: Prepare, num_adapter_slots: int = 0) -> None:
        super().__init__(prepare, num_adapter_slots)
        self._slots = self.Slots(num_adapter_slots)


ADAPTER_BUGS: tuple[type[DefaultScheduler], ...] = (AdapterOfTheRowBefore, AdapterForgottenInTheKey)
PREPARING_BUGS: tuple[type[Preparing], ...] = (
    QueueHeldUp,
    QueuedBeforeItIsLoaded,
    SlotsKeptForEver,
    SlotTakenWhileInUse,
    LoadedTwiceIntoTwoSlots,
    LoadedAdaptersFirst,
)
