"""The server's states, the exchanges that are open, and the service behind them.

    starting ─► ready ─► draining
        └─────────┴─────────┴────► dead

Every open HTTP exchange is registered here, so that a drain can wait for all of them, and the end of the drain or the
death of the engine can end each of them with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from ferrule.api.figures import HttpFigures
from ferrule.errors import EngineDead, FerruleError, UnavailableError
from ferrule.interfaces.service import ChatPrompt, Generate, Health, Output, Prompt, Service

T = TypeVar("T")

STARTING = "starting"
READY = "ready"
DRAINING = "draining"
DEAD = "dead"


class ClientGone(FerruleError):
    """The client has left: nobody is there to be answered."""


class Exchange:
    """One request and its answer. What runs on its behalf is one task at a time, which `stop` cancels."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()  # set when the client has left
        self._cause: FerruleError | None = None
        self._task: asyncio.Task[Any] | None = None

    def stop(self, cause: FerruleError) -> None:
        """End the work; `run` then raises `cause`. The first cause stays."""
        if self._cause is None:
            self._cause = cause
            if isinstance(cause, ClientGone):
                self.gone.set()
            if self._task is not None:
                self._task.cancel()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, or raise what the exchange was stopped for once the work has unwound."""
        if self._cause is not None:
            work.close()
            raise self._cause
        task = asyncio.create_task(work)
        self._task = task
        try:
            return await task
        except asyncio.CancelledError:
            if self._cause is None:
                raise
            raise self._cause from None
        finally:
            self._task = None


class Lifecycle:
    """State of this process. Used on the event loop only."""

    def __init__(self) -> None:
        self.state = STARTING
        self.detail = "The model is being loaded."
        self.figures = HttpFigures()
        self.service = LiveService(self)
        self.died = asyncio.Event()
        self._open: set[Exchange] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()

    def ready(self, service: Service) -> None:
        """The engine is up: requests may come. Ignored when a drain or a death came first."""
        if self.state == STARTING:
            self.service.attach(service)
            self.state, self.detail = READY, ""

    def drain(self) -> None:
        """No new work from here on."""
        if self.state != DEAD:
            self.state, self.detail = DRAINING, "The server is shutting down."

    def die(self, detail: str) -> None:
        """The engine is gone: every open exchange ends with an error. `detail` is fit for clients."""
        self.state, self.detail = DEAD, detail
        self.cut(EngineDead(detail))
        self.died.set()

    def cut(self, cause: FerruleError) -> None:
        """End every open exchange."""
        for exchange in list(self._open):
            exchange.stop(cause)

    @contextmanager
    def exchange(self) -> Iterator[Exchange]:
        """Register an exchange for the length of a block."""
        exchange = Exchange()
        self._open.add(exchange)
        self._quiet.clear()
        try:
            yield exchange
        finally:
            self._open.discard(exchange)
            if not self._open:
                self._quiet.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def quiet(self) -> None:
        """Wait until no exchange is open."""
        await self._quiet.wait()

    def admit(self, work: bool) -> None:
        """Raise UnavailableError unless a call may go on. While draining, calls that bring no work still may."""
        if self.state != READY and (work or self.state != DRAINING or not self.service.attached):
            raise UnavailableError(self.detail, retry_after=5)


class LiveService(Service):
    """The service as routers see it: unavailable until the engine is ready, then the real one."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._service: Service | None = None

    def attach(self, service: Service) -> None:
        self._service = service
        self.model, self.tokenizer, self.names = service.model, service.tokenizer, service.names

    @property
    def attached(self) -> bool:
        return self._service is not None

    @property
    def _real(self) -> Service:
        if self._service is None:
            raise UnavailableError(self._lifecycle.detail)
        return self._service

    def __getattr__(self, name: str) -> NoReturn:
        if name in {"model", "tokenizer", "names"}:
            raise UnavailableError(self._lifecycle.detail)
        raise AttributeError(name)

    def resolve(self, model: str | None) -> str:
        return self._real.resolve(model)

    def sampling_defaults(self) -> dict[str, Any]:
        return self._real.sampling_defaults()

    async def tokenize(self, prompt: Prompt | ChatPrompt) -> list[int]:
        return await self._real.tokenize(prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await self._real.detokenize(ids)

    def token_text(self, token_id: int) -> str:
        return self._real.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self._real.token_bytes(token_id)

    async def generate(self, request: Generate) -> AsyncIterator[Output]:
        return await self._real.generate(request)

    def health(self) -> Health:
        if self._lifecycle.state != READY:
            return Health(state=self._lifecycle.state, detail=self._lifecycle.detail)
        return self._real.health()

    def engine_health(self) -> Health:
        """What the engine says, whatever state this process is in."""
        return self._real.health()

    async def call(self, name: str, *args: Any) -> Any:
        return await self._real.call(name, *args)

    def exposition(self) -> tuple[str, str]:
        """The engine's figures, followed by those of HTTP."""
        media_type, text = self._real.exposition()
        return media_type, text + self._lifecycle.figures.exposition()
