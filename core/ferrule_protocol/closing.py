"""An iterator of events that closes its source even when it was never begun."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any


class Closing(AsyncIterator[Any]):
    """An iterator over `events`, which reads `source`. `aclose` closes both.

    A generator that was never begun runs no clean-up of its own when it is closed, so the source is closed here.
    """

    def __init__(self, events: AsyncIterator[Any], source: AsyncIterator[Any]) -> None:
        self._events = events
        self._source = source

    async def __anext__(self) -> Any:
        return await anext(self._events)

    async def aclose(self) -> None:
        for part in (self._events, self._source):
            if isinstance(part, AsyncGenerator) or hasattr(part, "aclose"):
                await part.aclose()
