"""The newest responses of each API key, in memory: a key that makes many never costs another one its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from ferrule.interfaces.response_store import ResponseStore, StoredResponse


@dataclass(frozen=True)
class Options:
    most: Annotated[int, Meta(ge=1, description="Most responses of a key.")] = 100


class Kept(Struct):
    """A response and its stream."""

    response: StoredResponse
    events: list[bytes]


class ExampleStore(ResponseStore):
    Options = Options
    conformance = {"few": {"most": 3}}

    def __init__(self, folder: Path | None, *, options: Options) -> None:
        super().__init__(folder)
        self._most = options.most
        self._owners: dict[str, dict[str, Kept]] = {}

    def add(self, response: StoredResponse) -> bool:
        kept = self._owners.setdefault(response.owner, {})  # oldest first
        if response.id in kept:
            return False
        kept[response.id] = Kept(response, [])
        if len(kept) > self._most:
            del kept[next(iter(kept))]
        return True

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        kept = self._owners.get(owner, {}).get(response_id)
        return None if kept is None else kept.response

    def update(self, response: StoredResponse) -> bool:
        kept = self._running(response.owner, response.id)
        if kept is not None:
            kept.response = response
        return kept is not None

    def delete(self, owner: str, response_id: str) -> bool:
        return self._owners.get(owner, {}).pop(response_id, None) is not None

    def append(self, owner: str, response_id: str, events: Sequence[bytes]) -> bool:
        kept = self._running(owner, response_id)
        if kept is not None:
            kept.events += events
        return kept is not None

    def events(self, owner: str, response_id: str, start: int) -> Sequence[bytes]:
        kept = self._owners.get(owner, {}).get(response_id)
        return () if kept is None else kept.events[start:]

    def close(self) -> None:
        self._owners.clear()

    def _running(self, owner: str, response_id: str) -> Kept | None:
        kept = self._owners.get(owner, {}).get(response_id)
        return None if kept is None or kept.response.ended else kept
