"""`response_store`: where responses of ``/v1/responses`` are kept, to be read, continued and followed later.

A store keeps records by owner and id, and knows nothing of the protocol: items, responses and events are JSON texts.
All methods but `close` are called on one thread of each API process, one at a time, and may block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct


class StoredResponse(Struct, frozen=True, kw_only=True):
    """One response. It holds its own input alone: what came before is in its parent, so a chain takes linear space."""

    id: str
    owner: str = ""  # name of the API key that made it; nobody else may read it
    parent: str | None = None  # id of the response that it continues, of the same owner
    created: float  # seconds since 1970
    ended: bool = True  # False: it is being generated in the background
    items: bytes = b"[]"  # JSON list of its input items
    response: bytes  # JSON object, as clients read it
    abandoned: bool = False  # set by `get`: it has not ended, and the process that generated it is gone


class ResponseStore(ABC):
    """A store of responses, with bounds of its own: what is evicted is gone, as if it were deleted.

    Made in each API process with `folder`, which all API processes of the server share and which goes with the server;
    None where there is one process. Methods raise RequestFailed, with a sentence fit for clients, when the store cannot
    be read or written; a failed call changes nothing.
    """

    shared: bool = False
    """Whether the instances of several API processes see the same responses; a literal. Without it, a server with
    several API processes does not start."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @abstractmethod
    def add(self, response: StoredResponse) -> bool:
        """Keep a new response, and evict old ones beyond the bounds. Return False for an id that its owner has."""

    @abstractmethod
    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response, or None."""

    @abstractmethod
    def update(self, response: StoredResponse) -> bool:
        """Replace a response that has not ended. Returns False, and changes nothing, where it has ended or is gone."""

    @abstractmethod
    def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response and its events. Returns whether it was there."""

    @abstractmethod
    def append(self, owner: str, response_id: str, events: Sequence[bytes]) -> bool:
        """Add events to the stream of a response that has not ended. Returns False where it has ended or is gone."""

    @abstractmethod
    def events(self, owner: str, response_id: str, start: int) -> Sequence[bytes]:
        """Return the events from number `start` on, in order; the first has number 0. None of a response that is gone.

        A store may return fewer than there are, but at least one if there is one.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. No method is called afterwards."""
