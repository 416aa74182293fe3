"""The bounds that the built-in stores have in common, as options."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from msgspec import Meta

from ferrule.errors import RequestFailed
from ferrule.interfaces.response_store import StoredResponse

CONFORMANCE = MappingProxyType({"few": {"max_responses": 3}, "short": {"max_age": 0.2}, "tiny": {"max_bytes": 1 << 16}})
MOST_EVENTS = 1000  # that are read at once
OVERHEAD = 512  # bytes of a record beside its texts, about


@dataclass(frozen=True)
class Bounds:
    """The bounds of a store, for all API keys together: beyond them the oldest responses go first."""

    max_responses: Annotated[int, Meta(ge=1, description="Most responses.")] = 1000
    max_bytes: Annotated[int, Meta(ge=1 << 16, description="Most bytes of all responses and their streams.")] = (
        256 << 20
    )
    max_age: Annotated[float, Meta(gt=0, description="Seconds after which a response goes.")] = 3600.0

    def check(self, size: int) -> None:
        """Raise RequestFailed for a response that is larger than the whole store."""
        if size > self.max_bytes:
            raise RequestFailed(
                f"The response cannot be stored: it takes {size} bytes, and the store keeps {self.max_bytes}. With "
                "store false it is answered and not stored."
            )


def size_of(response: StoredResponse) -> int:
    """Return the bytes that a response counts for, without its events."""
    return len(response.items) + len(response.response) + OVERHEAD
