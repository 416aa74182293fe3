"""Requests whose constraint is being loaded. They are queued when it is loaded; other requests do not wait for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future

from ferrule.types import EngineRequest


class Preparing:
    """By request id, in the order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[EngineRequest, Future[None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, id: str) -> bool:
        return id in self._waiting

    def add(self, request: EngineRequest, loaded: Future[None]) -> None:
        self._waiting[request.id] = request, loaded

    def take(self) -> Iterator[tuple[EngineRequest, BaseException | None]]:
        """Requests whose constraint is loaded, with None, or could not be, with what was raised."""
        for id, (request, loaded) in list(self._waiting.items()):
            if loaded.done():
                del self._waiting[id]
                yield request, CancelledError() if loaded.cancelled() else loaded.exception()

    def cancel(self, ids: Sequence[str]) -> list[EngineRequest]:
        """Forget those of `ids` that wait here."""
        return [self._waiting.pop(id)[0] for id in dict.fromkeys(ids) if id in self._waiting]
