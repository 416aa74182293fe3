"""Requests that need something loaded: a constraint, an adapter, or both.

They are queued when it is there; other requests do not wait for them. An adapter has a slot of the device's bank while
a request uses it, and keeps it after that until another adapter needs it. Where all slots are in use, a request waits
until one is not.

An adapter's slot never changes under a request, queued requests included. A request for which all slots are in use
waits outside the queue, and claims a slot: those that came after it are not given that slot, even if their adapter is
in it. So the slot is free once the requests that use it have ended, and popular adapters take turns with others. The
key of cached blocks contains the adapter's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from msgspec.structs import replace

from ferrule.errors import EngineDead, RequestError, UnavailableError
from ferrule.types import Adapter, AdapterLoad, EngineRequest, Need

_PIN = "pin "  # begins the ids of users of slots that are not requests
Prepare = Callable[[Need], "Future[None]"]


class AdapterSlots:
    """A table of the adapters in the device's slots, from 1 on, and of the requests that use each."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._adapters: dict[str, int] = {}  # name → slot, the one that was unused for longest first
        self._users: dict[str, int] = {}  # request id → slot
        self._claims: dict[str, int] = {}  # adapter that waits for a slot → the slot that is kept for it

    def begin(self) -> None:
        """Begin to place requests, which then come in the order of their arrival: the oldest claim a slot first."""
        self._claims.clear()

    def take(self, id: str, adapter: Adapter) -> tuple[int, bool] | None:
        """Give a request its adapter's slot, and say whether the adapter must be loaded there; None: none is free, or
        older requests have claimed it.

        Raises RequestError on a server without adapters.
        """
        if not self._count:
            raise RequestError("This server has no adapters.", "model")
        slot, fresh = self._adapters.get(adapter.name, 0), False
        pinned = self._pinned()
        if not slot and len(pinned) == self._count:
            raise RequestError(f"Every slot for adapters (--max-loras {self._count}) has a pinned one.", "model")
        if slot in self._claims.values():
            return None
        if not slot:
            slot, fresh = self._free(), True
            if not slot:
                self._claim(adapter.name)
                return None
        self._adapters.pop(adapter.name, None)
        self._adapters[adapter.name] = self._users[id] = slot
        return slot, fresh

    def give_back(self, id: str) -> None:
        """Forget a request; nothing for one without an adapter."""
        self._users.pop(id, None)

    def forget(self, adapter: Adapter) -> None:
        """Forget an adapter that could not be loaded: the next request for it tries again."""
        self._adapters.pop(adapter.name, None)
        self.give_back(_PIN + adapter.name)

    def _pinned(self) -> set[int]:
        return {slot for id, slot in self._users.items() if id.startswith(_PIN)}

    def _claim(self, name: str) -> None:
        """Reserve a slot for an adapter: of those that are not reserved yet, the one that no request has been given for
        longest. Does nothing where all are reserved.

        A reserved slot is given to no request, so it stays the first and is reserved again after the next `begin`.
        """
        if name not in self._claims:
            slots = dict.fromkeys((*self._adapters.values(), *range(1, self._count + 1)))
            claimed = {*self._claims.values(), *self._pinned()}
            if slot := next((slot for slot in slots if slot not in claimed), 0):
                self._claims[name] = slot

    def _free(self) -> int:
        """Return a slot that no request uses or claims, and forget the adapter in it; 0 where there is none."""
        used = {*self._users.values(), *self._claims.values()}
        empty = set(range(1, self._count + 1)) - set(self._adapters.values()) - used
        if empty:
            return min(empty)
        name = next((name for name, slot in self._adapters.items() if slot not in used), None)
        return 0 if name is None else self._adapters.pop(name)


@dataclass
class Waiting:
    """A request, and what is being loaded for it. `placed`: its adapter, if it has one, has a slot."""

    request: EngineRequest
    loads: list[Future[None]] = field(default_factory=list)
    placed: bool = True

    @property
    def ready(self) -> bool:
        return self.placed and all(load.done() for load in self.loads)


class Preparing:
    """Requests that wait for a load, by id, in the order of arrival. `prepare` begins a load, as `Executor.prepare`
    does.
    """

    def __init__(self, prepare: Prepare, num_adapter_slots: int = 0) -> None:
        self._prepare = prepare
        self._slots = AdapterSlots(num_adapter_slots)
        self._loads: dict[int, tuple[Adapter, Future[None]]] = {}  # by adapter slot: the last that began
        self._waiting: dict[str, Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, id: str) -> bool:
        return id in self._waiting

    def add(self, request: EngineRequest) -> None:
        """Begin to load a request's constraint; `take` finds a slot for its adapter. Raises EngineDead; what else goes
        wrong comes with the request.
        """
        waiting = self._waiting[request.id] = Waiting(request, placed=request.adapter is None)
        if request.grammar is not None:
            waiting.loads.append(self._begin(request.grammar))

    def take(self) -> Iterator[tuple[EngineRequest, BaseException | None]]:
        """Yield the requests for which all is loaded, with their adapter's slot, and those for which a load failed."""
        self._slots.begin()
        for id, waiting in list(self._waiting.items()):
            self._place(waiting)
            if not waiting.ready:
                continue
            del self._waiting[id]
            error = next((error for load in waiting.loads if (error := fault(load))), None)
            if error is not None:
                self._failed(waiting.request)
            yield waiting.request, error

    def adapters(self) -> Iterator[str]:
        """Yield the titles of adapters that requests wait for."""
        return (waiting.request.adapter.title for waiting in self._waiting.values() if waiting.request.adapter)

    def loaded(self) -> Iterator[str]:
        """Yield the titles of the adapters that are in slots."""
        return (one.title for one, load in self._loads.values() if load.done() and fault(load) is None)

    def pin(self, adapter: Adapter) -> Future[None]:
        """Begin to load an adapter into a slot that it keeps until `unpin`. Raises RequestError where all slots have
        pinned ones, UnavailableError while requests use or await them.
        """
        taken = self._slots.take(_PIN + adapter.name, adapter)
        if taken is None:
            raise UnavailableError("Requests use all slots for adapters. Try again.")
        return self._load(adapter, *taken)

    def unpin(self, name: str) -> None:
        """Let an adapter leave its slot again."""
        self.ended(_PIN + name)

    def cancel(self, ids: Sequence[str]) -> list[EngineRequest]:
        """Forget those of `ids` that wait here."""
        found = [self._waiting.pop(id).request for id in dict.fromkeys(ids) if id in self._waiting]
        for request in found:
            self.ended(request.id)
        return found

    def ended(self, id: str) -> None:
        """Note that a request, which may have an adapter, is over."""
        self._slots.give_back(id)

    def _failed(self, request: EngineRequest) -> None:
        self.ended(request.id)
        if request.adapter is not None and request.adapter_slot and fault(self._loads[request.adapter_slot][1]):
            self._slots.forget(request.adapter)

    def _place(self, waiting: Waiting) -> None:
        """Give a request's adapter a slot, if it has none and one is free, and begin to load it there if need be."""
        adapter = waiting.request.adapter
        if waiting.placed or adapter is None:
            return
        try:
            taken = self._slots.take(waiting.request.id, adapter)
        except RequestError as error:
            waiting.placed = True
            waiting.loads.append(failed(error))
            return
        if taken is None:
            return
        waiting.placed = True
        waiting.request = replace(waiting.request, adapter_slot=taken[0])
        waiting.loads.append(self._load(adapter, *taken))

    def _load(self, adapter: Adapter, slot: int, fresh: bool) -> Future[None]:
        """Return the load of an adapter into its slot, which begins now if it is fresh there, or had failed."""
        if fresh or (self._loads[slot][1].done() and fault(self._loads[slot][1]) is not None):
            self._loads[slot] = adapter, self._begin(AdapterLoad(adapter=adapter, slot=slot))
        return self._loads[slot][1]

    def _begin(self, need: Need) -> Future[None]:
        try:
            return self._prepare(need)
        except EngineDead:
            raise
        except Exception as error:
            return failed(error)


def fault(load: Future[None]) -> BaseException | None:
    """Return the exception of a load that is done, or None."""
    try:
        load.result()
    except (Exception, SystemExit) as error:  # a library may even call sys.exit
        return error
    return None


def failed(error: Exception) -> Future[None]:
    """Make a load that has failed."""
    future: Future[None] = Future()
    future.set_exception(error)
    return future
