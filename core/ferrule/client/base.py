"""`EngineClient`: the frontend's end of the engine, the same for HTTP and offline use."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from ferrule.interfaces.service import Health
from ferrule.shared_memory.board import Board
from ferrule.types import EngineRequest, EngineStats, FinishReason, ModelInfo, RequestDelta

_POLL = 0.01  # seconds


async def until(done: Callable[[], bool], seconds: float) -> None:
    """Return once `done()`, or after `seconds`. No thread is started, so it works also while the interpreter shuts
    down.
    """
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        await asyncio.sleep(_POLL)


class EngineClient(ABC):
    """The frontend's connection to the engine. One event loop owns a client, and its methods are called only there."""

    info: ModelInfo
    num_blocks: int
    board: Board  # what this process shares with the server's other ones
    remote: bool = False  # the engine is in another process: only plain data reaches it

    @abstractmethod
    def generate(self, request: EngineRequest, patient: bool = False) -> AsyncIterator[RequestDelta]:
        """Submit at once (not at the first `anext`) and iterate over the request's deltas until the terminal one.

        Where the caller is `patient`, deltas after the first one may wait for others and be joined with them. Closing
        the iterator before its end cancels the request. Raises EngineDead when the engine is gone.
        """

    @abstractmethod
    def cancel(self, ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests; each still gets its terminal delta. Unknown ids are ignored."""

    @abstractmethod
    def expect(self, backend: str) -> None:
        """Let the engine open a guided decoding backend. If that fails, the first request that needs it gets the
        error.
        """

    @abstractmethod
    async def call(self, name: str, *args: Any) -> Any:
        """Make an administrative call on the engine. Raises RequestFailed with the engine's message."""

    @abstractmethod
    def health(self) -> Health:
        """Return the state now, without waiting."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the last figures that the engine sent."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect from the engine; open requests end with EngineDead."""
