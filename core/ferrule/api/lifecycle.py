"""The server's states, its open exchanges, and the service behind them.

    starting ─► ready ─► draining
        └─────────┴─────────┴────► dead

Every open HTTP exchange is registered here, so that a drain can wait for all of them, and the end of the drain or the
death of the engine can end each of them with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from ferrule.api_keys import BACKGROUND
from ferrule.errors import EngineDead, FerruleError, OverloadedError, UnavailableError
from ferrule.interfaces.dialect import OPENAI, Dialect
from ferrule.interfaces.service import Health, Service
from ferrule.interfaces.stats import HttpStats
from ferrule.shared_memory.board import LOAD, STATE, STATES, Board

T = TypeVar("T")

STARTING = "starting"
READY = "ready"
DRAINING = "draining"
DEAD = "dead"

_MANY, _FEW = 64, 16  # requests in a turn of the event loop
_FULL = 1.0  # seconds in which the queue counts as full after a refusal
_EARLY = 4096  # calls that are remembered until the engine is ready


class ClientGone(FerruleError):
    """The client has left, so that no answer can be sent."""


class Exchange:
    """One request and its answer. Work done for it runs in a task, which `stop` cancels.

    Work may run further work through `run`: then the inner task is cancelled, and the outer one sees the cause.
    """

    def __init__(self) -> None:
        self.gone = asyncio.Event()  # set when the client has left
        self.works = False  # the call brings a body
        self.answered = False  # the last byte of the answer was sent
        self.cause: FerruleError | None = None  # why the work was ended
        self._task: asyncio.Task[Any] | None = None

    def stop(self, cause: FerruleError) -> None:
        """End the work; `run` then raises `cause`. The first cause stays.

        A client that leaves after its whole answer ends nothing, so that background tasks and dependencies finish.
        """
        if isinstance(cause, ClientGone):
            self.gone.set()
            if self.answered:
                return
        if self.cause is None:
            self.cause = cause
            if self._task is not None:
                self._task.cancel()

    async def left(self) -> None:
        """Wait until the client has left."""
        await self.gone.wait()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, or raise the cause of the exchange's stop once the work has unwound."""
        if self.cause is not None:
            work.close()
            raise self.cause
        task, outer = asyncio.create_task(work), self._task
        self._task = task
        try:
            return await task
        except asyncio.CancelledError:
            if self.cause is None:
                raise
            raise self.cause from None
        finally:
            self._task = outer
            del task  # it has the exception, whose traceback has this frame


class Lifecycle:
    """The state of this process. Use it on the event loop only."""

    def __init__(self, board: Board | None = None) -> None:
        self.board = board or Board()
        self.state = STARTING
        self.detail = "The model is being loaded."
        self.dialect: Callable[[bytes], Dialect] = lambda path: OPENAI  # of what fails before the application has it
        self.live = LiveService(self)
        self.service = cast(Service, self.live)
        self.died = asyncio.Event()
        self.stirred: Callable[[], None] = lambda: None  # an exchange begins
        self._full_until = 0.0  # a monotonic time
        self._open: set[Exchange] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()

    def ready(self, service: Service) -> None:
        """Admit requests once the engine has started. Does nothing after a drain began or the engine died."""
        if self.state == STARTING:
            self.live.attach(service)
            self._enter(READY, "")

    def drain(self) -> None:
        """Refuse new work from now on."""
        if self.state != DEAD:
            self._enter(DRAINING, "The server is shutting down.")

    def die(self, detail: str) -> None:
        """Record the engine's death, and end every open exchange with an error. `detail` is fit for clients."""
        self._enter(DEAD, detail)
        self.cut(EngineDead(detail))
        self.died.set()

    def _enter(self, state: str, detail: str) -> None:
        self.state, self.detail = state, detail
        self.board.put(STATE, STATES.index(state))

    def cut(self, cause: FerruleError) -> None:
        """End every open exchange with `cause`."""
        for exchange in list(self._open):
            exchange.stop(cause)

    @contextmanager
    def exchange(self) -> Iterator[Exchange]:
        """Register an exchange for the length of a block."""
        exchange = Exchange()
        self._open.add(exchange)
        self._quiet.clear()
        self.stirred()
        try:
            yield exchange
        finally:
            exchange.cause = None  # its traceback has frames that refer to the exchange, which would be a cycle
            self.board.add(LOAD, -exchange.works)
            self._open.discard(exchange)
            if not self._open:
                self._quiet.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def load(self) -> int:
        """The number of open exchanges with work, in all API processes."""
        return self.board.total(LOAD)

    def at_once(self) -> int:
        """Return how many requests with a body begin in one turn of the event loop.

        The number is large while the queue has room, so that the last request of a burst hears soon when the queue is
        full. It is small after a refusal, or refusing clients that retry at once could take the whole processor.
        """
        return _FEW if time.monotonic() < self._full_until else _MANY

    def check_room(self, ahead: int) -> None:
        """Raise OverloadedError unless the queue has a place behind `ahead` other requests."""
        try:
            self.service.check_room(ahead)
        except OverloadedError:
            self._full_until = time.monotonic() + _FULL
            raise

    async def quiet(self) -> None:
        """Wait until no exchange is open."""
        await self._quiet.wait()

    def admit(self, exchange: Exchange, works: bool) -> None:
        """Raise UnavailableError unless a call may go on; one that `works` counts as load until it ends.

        While draining, calls that bring no work still may go on.
        """
        if self.state != READY and (works or self.state != DRAINING or not self.live.attached):
            raise UnavailableError(self.detail, retry_after=5)
        if works and not exchange.works and not BACKGROUND.get():
            exchange.works = True
            self.board.add(LOAD, 1)


class LiveService:
    """The service as routers see it: every use raises UnavailableError until the engine is ready."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._service: Service | None = None
        self._early: deque[HttpStats] = deque(maxlen=_EARLY)

    def attach(self, service: Service) -> None:
        self._service = service

    @property
    def attached(self) -> bool:
        return self._service is not None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._service is None:
            raise UnavailableError(self._lifecycle.detail)
        return getattr(self._service, name)

    def health(self) -> Health:
        if self._lifecycle.state != READY:
            return Health(state=self._lifecycle.state, detail=self._lifecycle.detail)
        return self.engine_health()

    def engine_health(self) -> Health:
        """Return the engine's own health, whatever state this process is in."""
        found: Health = self.__getattr__("health")()
        return found

    def answered(self, stats: HttpStats) -> None:
        """Count a call; calls before the engine is ready are counted once it is."""
        self._early.append(stats)
        while self._early and self._service is not None:
            self._service.answered(self._early.popleft())

    def stalled(self, seconds: float) -> None:
        """Count a stall of the event loop, once there is a service."""
        if self._service is not None:
            self._service.stalled(seconds)
