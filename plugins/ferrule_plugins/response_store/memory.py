"""`memory`: responses in the memory of the API process. They go with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ferrule.interfaces.response_store import ResponseStore, StoredResponse
from ferrule_plugins.response_store.bounds import MOST_EVENTS, Bounds, size_of


@dataclass
class _Entry:
    response: StoredResponse
    size: int
    since: float  # of the monotonic clock
    events: list[bytes] = field(default_factory=list)


class MemoryStore(ResponseStore):
    Options = Bounds
    conformance = "ferrule_plugins.response_store.bounds:CONFORMANCE"

    def __init__(self, folder: Path | None, *, options: Bounds) -> None:
        super().__init__(folder)
        self._bounds = options
        self._entries: dict[tuple[str, str], _Entry] = {}  # oldest first
        self._bytes = 0

    def add(self, response: StoredResponse) -> bool:
        self._evict()
        key, size = (response.owner, response.id), size_of(response)
        if key in self._entries:
            return False
        self._bounds.check(size)
        self._entries[key] = _Entry(response, size, time.monotonic())
        self._bytes += size
        self._evict()
        return True

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        self._evict()
        entry = self._entries.get((owner, response_id))
        return None if entry is None else entry.response

    def update(self, response: StoredResponse) -> bool:
        entry = self._running(response.owner, response.id)
        if entry is None:
            return False
        grown = size_of(response) - size_of(entry.response)
        self._bounds.check(entry.size + grown)
        entry.response = response
        self._grow(entry, grown)
        return True

    def delete(self, owner: str, response_id: str) -> bool:
        entry = self._entries.pop((owner, response_id), None)
        if entry is not None:
            self._bytes -= entry.size
        return entry is not None

    def append(self, owner: str, response_id: str, events: Sequence[bytes]) -> bool:
        entry = self._running(owner, response_id)
        if entry is None:
            return False
        grown = sum(map(len, events))
        self._bounds.check(entry.size + grown)
        entry.events += events
        self._grow(entry, grown)
        return True

    def events(self, owner: str, response_id: str, start: int) -> Sequence[bytes]:
        entry = self._entries.get((owner, response_id))
        return () if entry is None else entry.events[start : start + MOST_EVENTS]

    def close(self) -> None:
        self._entries.clear()

    def _running(self, owner: str, response_id: str) -> _Entry | None:
        self._evict()
        entry = self._entries.get((owner, response_id))
        return None if entry is None or entry.response.ended else entry

    def _grow(self, entry: _Entry, grown: int) -> None:
        entry.size += grown
        self._bytes += grown
        self._evict()

    def _evict(self) -> None:
        """Let go of what is too old, and of the oldest beyond the bounds."""
        oldest_allowed = time.monotonic() - self._bounds.max_age
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            fits = len(self._entries) <= self._bounds.max_responses and self._bytes <= self._bounds.max_bytes
            if fits and entry.since > oldest_allowed:
                return
            self.delete(*key)
