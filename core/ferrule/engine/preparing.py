"""Requests whose constraint is being loaded. They are queued when it is loaded; other requests do not wait for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

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

    def take(self) -> Iterator[tuple[EngineRequest, Future[None]]]:
        """Requests whose constraint is loaded or could not be; the future says which."""
        for id, (request, loaded) in list(self._waiting.items()):
            if loaded.done():
                del self._waiting[id]
                yield request, loaded

    def cancel(self, ids: Sequence[str]) -> list[EngineRequest]:
        """Forget those of `ids` that wait here."""
        return [self._waiting.pop(id)[0] for id in dict.fromkeys(ids) if id in self._waiting]
