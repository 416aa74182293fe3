"""`Operations`: the service's methods for operators and the HTTP server, besides generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ferrule.client.base import EngineClient
from ferrule.errors import EngineDead, FerruleError, RequestError, UnavailableError
from ferrule.frontend.adapters.registry import Adapters
from ferrule.frontend.admission.admit import PromptReader
from ferrule.frontend.admission.ledger import Ledger
from ferrule.hooks import HEADERS
from ferrule.interfaces.hooks import Arrival
from ferrule.interfaces.service import Administration, Health, ServedAdapter
from ferrule.interfaces.stats import HttpStats


class Operations(Administration):
    """The part of a service that serves operators and the HTTP edge; it needs these attributes."""

    ledger: Ledger
    _adapters: Adapters
    _client: EngineClient
    _reader: PromptReader

    def health(self) -> Health:
        """Return the state of the server. This process is answering, but another API process may be stalled."""
        now = self._client.health()
        if now.state == "ready" and (stall := self.ledger.board.api_stall()):
            return Health(state="stalled", detail=stall)
        return now

    def _check_available(self) -> None:
        health = self._client.health()
        if health.state != "ready":
            raise UnavailableError(f"The engine cannot take requests now: {health.state}.")

    @contextmanager
    def _telling_refusals(self, model: str, at: float) -> Iterator[None]:
        """Tell hooks of an error with which a request that came `at` this instant is refused."""
        try:
            yield
        except FerruleError as error:
            self.ledger.loggers.hooks.request_refused(model, error, Arrival(at=at, headers=HEADERS.get()))
            raise

    async def call(self, name: str, *args: Any) -> Any:
        try:
            return await self._client.call(name, *args)
        except EngineDead:
            raise UnavailableError("The engine is not running.") from None

    def adapters(self) -> list[ServedAdapter]:
        counts = self._reader.num_virtual
        return [
            ServedAdapter(
                name=one.name,
                parent=one.parent,
                path=one.path,
                max_model_len=one.info.max_len,
                num_virtual=counts.get(one.name, 0),
            )
            for one in self._adapters.all()
        ]

    async def load_adapter(self, name: str, path: str, in_place: bool = False) -> None:
        await self._adapters.load(name, path, in_place)

    async def ensure_adapter(self, name: str, path: str, again: bool = False) -> None:
        """Serve the adapter in a folder that the operator has named, unless it is served. Raises RequestError."""
        await self._adapters.ensure(name, path, again)

    async def pin_adapter(self, name: str) -> str:
        """Keep a loaded adapter in a slot of the device until ``unpin_adapter`` is called with the identity that this
        returns. Raises RequestError, UnavailableError.
        """
        served = self._adapters.known(name)
        if served is None or served.adapter is None:
            raise RequestError("Only adapters of weights have slots.")
        adapter = served.adapter
        await self.call("pin_adapter", adapter.name, adapter.path, adapter.served)
        return adapter.name

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload(name)

    def report(self) -> None:
        self.ledger.engine(self._client.stats())

    def exposition(self) -> tuple[str, str]:
        self.report()
        return self.ledger.loggers.exposition()

    def answered(self, stats: HttpStats) -> None:
        self.ledger.loggers.tell("on_http", stats, always=True)

    def check_room(self, ahead: int = 0) -> None:
        self.ledger.check_room(ahead)

    def stalled(self, seconds: float) -> None:
        self.ledger.loggers.tell("on_stall", seconds, always=True)
