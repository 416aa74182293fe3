"""What every engine client shares: it hands the engine's messages to the streams that wait for them.

Output that nobody reads pauses its request. Each stream counts the bytes that wait to be read; above 32 KiB, for longer
than a turn of the event loop, the client sends `Pause`, and sends it again when all of it has been read. In normal
operation no such message is sent; a window of credits would need some for every request. The scheduler takes a paused
request out of its slot at once and releases its blocks, so it cannot hold up others, and no rule for preemption has to
know of it. Its blocks stay in the prefix cache. It is not counted as preempted, or a slow reader would come to run
alone. The reader of an answer that is not streamed wakes up for the first token, and then once for every 8 KiB.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from ferrule import log
from ferrule.client.base import EngineClient
from ferrule.client.figures import past_of, with_past
from ferrule.config import LimitsConfig
from ferrule.errors import EngineDead, FerruleError, ForbiddenError, RequestError, RequestFailed, UnavailableError
from ferrule.interfaces.service import Health
from ferrule.shared_memory.board import CHECKED, READY, Board
from ferrule.shared_memory.buffers import Buffers
from ferrule.types import EngineRequest, EngineStats, FinishReason, RequestDelta
from ferrule.wire.messages import (
    Call,
    CallReply,
    Cancel,
    Deltas,
    FromEngine,
    Pause,
    Ready,
    Submit,
    ToEngine,
    Unread,
)

_UNREAD = "The server is short of memory for this answer."
_RESTARTING = "The engine has stopped and is being started again."
_MAX_UNREAD = 32 << 10  # bytes of deltas, about, that may wait for their reader while the request gets steps
_MAX_READ = 8 << 10  # bytes of deltas, about, that are read at once; then others on the event loop have their turn
_PATIENCE = 0.1  # seconds for which more may wait: the reader's turn on the event loop may be next

_ERRORS: Mapping[int, type[FerruleError]] = MappingProxyType(
    {500: RequestFailed, 503: UnavailableError, 403: ForbiddenError}
)

_logger = log.get("client")


class DeltaStream(AsyncIterator[RequestDelta]):
    """The deltas of one request. Deltas that have come since the last was read are joined, so that a process that lags
    behind the engine does less for each token. `aclose` before the terminal delta cancels the request.

    A `patient` reader waits for the whole answer: it gets the first delta at once and later ones in batches. If nobody
    reads, the engine pauses the request until everything that has arrived is read. `request` is kept where it may be
    submitted again, until the first delta.
    """

    __slots__ = (
        "_client",
        "_done",
        "_due",
        "_enough",
        "_error",
        "_id",
        "_items",
        "_patient",
        "_paused",
        "_since",
        "_unread",
        "_waiter",
        "request",
    )

    def __init__(
        self, client: DemuxClient, request_id: str, request: EngineRequest | None = None, patient: bool = False
    ) -> None:
        self.request = request
        self._patient = patient
        self._enough = 0  # bytes of deltas, about, for which the reader is woken
        self._due = False  # the reader is to read the items now
        self._client = client
        self._id = request_id
        self._items: list[RequestDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: EngineDead | None = None
        self._done = False
        self._paused = False
        self._since = 0.0  # when the first of `_items` came
        self._unread = client.buffers.share()

    async def __anext__(self) -> RequestDelta:
        if self._due:
            await asyncio.sleep(0)
        elif self._paused:
            self._pause(False)
        while not self._due:
            if self._error is not None:
                raise self._error
            if self._done:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items = self._take()
        self._due = bool(self._items)
        self._enough = _MAX_READ if self._patient else 0
        return items[0] if len(items) == 1 else _joined(items)

    def _take(self) -> list[RequestDelta]:
        """Take the oldest items: all of them, unless they are very many."""
        items, self._items = self._items, []
        if self._unread.size <= _MAX_READ:
            self._unread.close()
            return items
        count = size = 0
        while count < len(items) and size < _MAX_READ:
            size += _weight(items[count])
            count += 1
        self._unread.grow(-size)
        self._items = items[count:]
        return items[:count]

    def push(self, delta: RequestDelta) -> None:
        self.request = None
        now = time.monotonic()
        if not self._items:
            self._since = now
        self._items.append(delta)
        self._unread.grow(_weight(delta))
        self._done = delta.finish is not None
        size, full = self._unread.size, self._client.buffers.full
        if self._done or full or size >= self._enough:
            self._due = True
            self._wake()
        if (full or size > _MAX_UNREAD) and now - self._since > _PATIENCE and not (self._paused or self._done):
            self._pause(True)

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        self._client.pause(self._id, paused)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Push a last delta, in place of the engine's."""
        self.push(RequestDelta(id=self._id, finish=reason, error=error))

    def fail(self, error: EngineDead) -> None:
        self._error = error
        self._due = bool(self._items)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def aclose(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        if not self._done and self._error is None:
            self._done = True
            self._unread.close()
            self._client.forget(self._id)


def _weight(delta: RequestDelta) -> int:
    """Estimate the bytes that a delta takes."""
    kinds = (delta.logprobs, delta.prompt_logprobs)
    return 240 + 40 * len(delta.token_ids) + sum(len(some) * (100 + 120 * len(some[0].top)) for some in kinds if some)


def _joined(deltas: Sequence[RequestDelta]) -> RequestDelta:
    """Return one delta in place of several: the last one's fields, with the tokens of all."""
    lists = ("token_ids", "logprobs", "prompt_logprobs")
    whole = {name: tuple(chain.from_iterable(getattr(delta, name) for delta in deltas)) for name in lists}
    return replace(deltas[-1], **whole)


class DemuxClient(EngineClient):
    """A client that sorts the engine's messages by request. Subclasses carry messages: `_post` sends one, and they call
    `_dispatch` with each that arrives.

    `watchdog` is the time in seconds after which an engine that makes no progress is ended. With `restarts` another
    engine may follow one that has died (`lose`): requests that got no delta from the dead one are then submitted to the
    next, once, so that a request that kills engines cannot kill one after the other. When this process keeps
    `max_buffered` bytes, requests whose output waits to be read are paused however little it is.
    """

    def __init__(
        self,
        board: Board | None = None,
        watchdog: float = 120.0,
        restarts: bool = False,
        max_buffered: int = LimitsConfig.max_buffered_bytes,
    ) -> None:
        self.board = board or Board()
        self.buffers = Buffers(self.board, max_buffered)
        self._watchdog = watchdog
        self._restarts = restarts
        self._lost = False  # the engine has died, and the next one has not answered
        self._streams: dict[str, DeltaStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._stats = EngineStats()
        self._past = EngineStats()  # counters of the engines that have died
        self._served = 0.0  # this process's READY on the board when it lost its engine
        self._dead: EngineDead | None = None
        self._ready = asyncio.Event()

    def begin_loading(self) -> None:
        """Let the engine load weights, as this process has checked everything that it can check without them."""
        self.board.put(CHECKED, 1.0)

    @abstractmethod
    def _post(self, message: ToEngine) -> None:
        """Send without waiting."""

    def generate(self, request: EngineRequest, patient: bool = False) -> DeltaStream:
        if self._dead is not None:
            raise self._dead
        stream = DeltaStream(self, request.id, request if self._restarts else None, patient)
        self._streams[request.id] = stream
        if not self._lost:  # else the next engine gets it, with all streams that wait
            self._post(Submit(request))
        return stream

    def cancel(self, ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        if self._lost:
            for stream in filter(None, [self._streams.pop(id, None) for id in ids]):
                stream.end(reason)
        elif self._dead is None and ids:
            for stream in filter(None, map(self._streams.get, ids)):
                stream.request = None  # not for another engine
            self._post(Cancel(tuple(ids), reason))

    def pause(self, request_id: str, paused: bool) -> None:
        """Let the engine stop giving steps to a request, or give it steps again."""
        if self._dead is None and not self._lost and request_id in self._streams:
            self._post(Pause(request_id, paused))

    def forget(self, request_id: str) -> None:
        """Cancel a request, and drop the deltas that still come."""
        if self._streams.pop(request_id, None) is not None:
            self.cancel([request_id])

    def expect(self, backend: str) -> None:
        if self._dead is None and not self._lost:
            self._post(Call(0, "expect", (backend,)))

    async def call(self, name: str, *args: Any) -> Any:
        if self._dead is not None or self._lost:
            raise self._dead or EngineDead(_RESTARTING)
        number = next(self._numbers)
        reply = self._calls[number] = asyncio.get_running_loop().create_future()
        self._post(Call(number, name, args))
        try:
            return await reply
        finally:
            self._calls.pop(number, None)

    def health(self) -> Health:
        if self._dead is not None:
            return Health(state="dead", detail=str(self._dead))
        if not self._ready.is_set():
            return Health(state="starting", detail=_RESTARTING if self._lost else "")
        if stall := self.board.engine_stall(self._watchdog):
            return Health(state="stalled", detail=stall)
        return Health(state="ready" if self.board.ready else "starting")

    def stats(self) -> EngineStats:
        return self._stats

    async def wait_ready(self) -> None:
        """Return when the model is loaded. Raises EngineDead when the engine died instead."""
        await self._ready.wait()
        if self._dead is not None:
            raise self._dead

    def die(self, message: str) -> None:
        """Keep the first cause of death, and end everything that waits."""
        if self._dead is not None:
            return
        self._dead, self._lost = EngineDead(message), False
        self._end_all(self._dead, ())
        self._ready.set()

    def lose(self, message: str) -> None:
        """Note that the engine has died and another may follow: requests that got no delta wait for the next, all
        others end.
        """
        self._lost = True
        self._ready.clear()
        self._served = self._served or self.board.get(READY, self.board.row)
        self.board.put(READY, 0.0)
        self._stats = self._past = past_of(self._stats)
        self._end_all(EngineDead(message), [id for id, stream in self._streams.items() if stream.request is not None])

    def _end_all(self, error: EngineDead, kept: Collection[str]) -> None:
        """End everything that waits for the engine, except for the streams of `kept`."""
        streams, self._streams = self._streams, {id: self._streams[id] for id in kept}
        for id, stream in streams.items():
            if id not in self._streams:
                stream.fail(error)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)

    def _found(self, ready: Ready) -> None:
        """Note that an engine has answered: the first one, or the successor of one that died."""
        self.info, self.num_blocks = ready.info, ready.num_blocks
        self._ready.set()
        if self._lost:
            self._lost = False
            _logger.info("another engine serves", submitted_again=len(self._streams))
            for stream in self._streams.values():
                if stream.request is not None:
                    self._post(Submit(stream.request))
                    stream.request = None
            self.board.put(READY, self._served)
            self._served = 0.0

    def _dispatch(self, message: FromEngine | Unread) -> None:
        if isinstance(message, Deltas):
            if message.stats is not None:
                self._stats = with_past(self._past, message.stats) if self._past.restarts else message.stats
            for delta in message.deltas:
                find = self._streams.get if delta.finish is None else self._streams.pop
                if (stream := find(delta.id, None)) is not None:
                    stream.push(delta)
        elif isinstance(message, CallReply):
            reply = self._calls.get(message.number)
            if reply is not None and not reply.done():
                if message.error is None:
                    reply.set_result(message.result)
                else:
                    reply.set_exception(_ERRORS.get(message.status, RequestError)(message.error))
        elif isinstance(message, Unread):
            _logger.error("short of memory: what came for some requests could not be read", requests=len(message.ids))
            for id in message.ids:
                if (unread := self._streams.pop(id, None)) is not None:
                    unread.end(FinishReason.ERROR, _UNREAD)
            self.cancel(message.ids)
        elif isinstance(message, Ready):
            self._found(message)
        else:
            self.die(message.message)
