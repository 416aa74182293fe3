"""The desk beside the door: it answers probes, logs them, and tells an API process to count them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from ferrule.api.access_log import log_call
from ferrule.config import Resolved
from ferrule.door.probes import (
    ALONE,
    Answer,
    Call,
    Figures,
    ProbeReader,
    answer_bytes,
    health,
    health_answer,
    unavailable,
)
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.stats import HttpStats
from ferrule.wire.board import Board
from ferrule.wire.doorway import Answered, Doorway, Fresh, Loaded, Message, Offer, Refresh

_FRESH = 0.02  # seconds that an API process has to bring its figures up to date


class Desk:
    """Used on the door's event loop only. The first doorway is that of the process that speaks for all."""

    def __init__(
        self, config: Resolved, plugins: Plugins, board: Board, folder: Path, doorways: Sequence[Doorway]
    ) -> None:
        self._config = config
        self._board = board
        self._doorways = doorways
        self._figures = Figures(config, plugins, folder)
        self._offers: dict[Doorway, Offer] = {}
        self._reader: ProbeReader | None = None  # until every API process has said what it offers
        self._alone = ProbeReader(config, ALONE)
        self._number = 0
        self._fresh: asyncio.Future[None] | None = None
        self._begun: asyncio.Task[Answer] | None = None  # the metrics that are made
        self._next: asyncio.Task[Answer] | None = None  # and those that will be, with what happens until they begin
        self.draining = False

    def hear(self, doorway: Doorway, message: Message) -> None:
        """What an API process says."""
        if isinstance(message, Offer):
            self._offers[doorway] = message
            if len(self._offers) == len(self._doorways):
                self._reader = ProbeReader(self._config, message)
        elif isinstance(message, Loaded):
            self._figures.load(message.info)
        elif isinstance(message, Fresh) and message.number == self._number and self._fresh is not None:
            resolve(self._fresh)

    def read(self, head: bytes) -> Call | None:
        """The probe that these first bytes of a request are, if it can be answered here now."""
        call = self._reader.read(head) if self._reader is not None else None
        if call is None:
            return None
        now = health(self._config, self._board, self.draining)
        if now.state == "dead":
            return None
        if call.probe.what == "metrics":
            return call if self._figures.open and now.state != "starting" else None
        return call if call.probe.what == "health" else None

    def read_alone(self, head: bytes) -> Call | None:
        """The probe that these are where nobody else could answer it, whatever the state."""
        call = self._reader.read(head) if self._reader is not None else None
        return call or self._alone.read(head)

    async def answer(self, call: Call) -> tuple[int, bytes]:
        """Status, and the whole answer."""
        now = health(self._config, self._board, self.draining)
        if call.probe.what == "metrics" and self._figures.open:
            answer = await self._metrics()
        elif call.probe.what == "metrics":
            answer = unavailable(now.detail or "The metrics cannot be shown here.")
        else:
            answer = health_answer(now)
        return answer[0], answer_bytes(call, answer, self._config)

    async def _metrics(self) -> Answer:
        """Those that come while some are made share the next ones: a thousand scrapes at once cost as much as two."""
        if self._next is None:
            self._next = asyncio.create_task(self._render(self._begun))
        return await asyncio.shield(self._next)

    async def _render(self, before: asyncio.Task[Answer] | None) -> Answer:
        if before is not None:
            await asyncio.wait([before])
        self._begun, self._next = self._next, None
        self._number += 1
        self._fresh = asyncio.get_running_loop().create_future()
        if self._doorways[0].send(Refresh(self._number)):
            await asyncio.wait([self._fresh], timeout=_FRESH)
        return self._figures.answer()

    def note(self, call: Call, client: str, status: int, sent: int, began: float) -> None:
        """Log an answer and have it counted. `began` is a monotonic time, `sent` the bytes of the body."""
        seconds = time.monotonic() - began
        if not self._config.frontend.disable_uvicorn_access_log:
            log_call(client, (call.method, call.target, "1.1"), status, seconds, call.key)
        stats = HttpStats(route=call.path, method=call.method, status=status, seconds=seconds, received=0, sent=sent)
        self._doorways[0].send(Answered(stats))


def resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
