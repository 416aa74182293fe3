"""The work of a batch: a window of requests in flight, and a writer that puts their results into the journal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ferrule import log
from ferrule.errors import EngineDead, StartupError
from ferrule_plugins.batch.journal import Journal, Record
from ferrule_plugins.batch.rows import AppResponse, Bad, Row, answered, refused

_BUSY = (429, 503)
_REFUSED = 400
_FAULT = 500
_AT_ONCE = 16  # rows, and
_BYTES = 1 << 20  # bytes of bodies that are read in one visit to a thread; one row may be larger
_LOOK = 0.1  # seconds between two looks at the size of the window

_logger = log.get("batch")


class Counter(Protocol):
    """An object that is told of every row whose result is in the journal."""

    def step(self, failed: bool) -> None: ...


@dataclass(frozen=True)
class Asker:
    """The application's side of a batch: `ask` answers a row, `alive` tells after an error of the server whether the
    engine still runs.

    `busy_tries` are the times that a row is turned away while no other one is answered, before that is its result; None
    stands for any number. `fault_tries` are the times that a row is sent again after another error of the server.
    """

    ask: Callable[[str, bytes], Awaitable[AppResponse]]
    alive: Callable[[], bool]
    busy_tries: int | None = 5
    fault_tries: int = 0


class Drive:
    """One run: requests in flight, and a writer of their results.

    `window` returns the number of rows that may be in flight now; one always may. `stopping` ends the sending of rows;
    the requests that run then get `grace` seconds, or until `insisted`.
    """

    def __init__(self, asker: Asker, journal: Journal, progress: Counter, window: Callable[[], int]) -> None:
        self.stopping = asyncio.Event()
        self.insisted = asyncio.Event()
        self.running = 0
        self._asker = asker
        self._journal = journal
        self._progress = progress
        self._window = window
        self._taken = 0  # places of the window: rows in flight, and results that are not written yet
        self._freed = asyncio.Event()
        self._answered = 0
        self._results: asyncio.Queue[Record | None] = asyncio.Queue()

    async def run(self, rows: Iterator[Row | Bad], grace: float) -> None:
        """Return when all rows are done, or when the run was stopped. Raises EngineDead, StartupError.

        However the run ends, the results that had come are in the journal. Rows are read in another thread.
        """
        feeding = asyncio.create_task(self._feed(rows))
        writing = asyncio.create_task(self._write())
        stopped = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({feeding, writing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self.stopping.is_set():
                await self._last_moments(feeding, writing, grace)
        finally:
            for task in (stopped, feeding):
                task.cancel()
            await asyncio.wait({feeding})
            self._results.put_nowait(None)
            await asyncio.wait({writing})
        writing.result()
        if not feeding.cancelled():
            _raise_first(feeding)

    async def _last_moments(self, feeding: asyncio.Task[None], writing: asyncio.Task[None], grace: float) -> None:
        insisted = asyncio.create_task(self.insisted.wait())
        _logger.info("stopping: what runs is finished first", running=self.running, timeout=grace)
        await asyncio.wait({feeding, writing, insisted}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        insisted.cancel()

    async def _feed(self, rows: Iterator[Row | Bad]) -> None:
        async with asyncio.TaskGroup() as group:
            going = True
            while going:
                some, error = await asyncio.to_thread(_some, rows)
                for row in some:
                    await self._place()
                    if self.stopping.is_set():
                        return
                    if isinstance(row, Bad):
                        self._results.put_nowait(Record(row.number, _REFUSED, refused(row)))
                        continue
                    self.running += 1
                    group.create_task(self._one(row))
                if error is not None:
                    raise error
                going = bool(some)

    async def _place(self) -> None:
        """Take a place of the window, once there is one."""
        while self._taken >= max(1, self._window()):
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._freed.wait()
        self._taken += 1

    async def _one(self, row: Row) -> None:
        try:
            answer = await self._answer(row)
        finally:
            self.running -= 1
        self._results.put_nowait(Record(row.number, answer.status, answered(row, answer)))

    async def _answer(self, row: Row) -> AppResponse:
        """Return the final answer of a row: a row that a full queue turns away is sent again, as long as others are
        answered.

        Raises EngineDead.
        """
        busy = faults = 0
        while True:
            before = self._answered
            answer = await self._asker.ask(row.url, row.body)
            if answer.status >= _FAULT and not self._asker.alive():
                raise EngineDead("The engine has stopped.")
            if answer.status in _BUSY and busy != self._asker.busy_tries:
                await asyncio.sleep(answer.retry_after)
                busy += self._answered == before
            elif answer.status >= _FAULT and answer.status not in _BUSY and faults < self._asker.fault_tries:
                faults += 1
                await asyncio.sleep(answer.retry_after)
            else:
                self._answered += 1
                return answer

    async def _write(self) -> None:
        """Write results in groups: those that came while the disk was busy are one write. A None in the queue ends the
        writing.
        """
        going = True
        while going:
            group = [await self._results.get()]
            with contextlib.suppress(asyncio.QueueEmpty):
                while True:
                    group.append(self._results.get_nowait())
            records = [record for record in group if record is not None]
            going = len(records) == len(group)
            if records:
                await asyncio.to_thread(self._journal.append, records)
            for record in records:
                self._taken -= 1
                self._progress.step(failed=record.status != 200)
            self._freed.set()


def _some(rows: Iterator[Row | Bad]) -> tuple[list[Row | Bad], StartupError | None]:
    """Return some more rows, none at the end; and the error that came after them, if any."""
    found: list[Row | Bad] = []
    size = 0
    try:
        for row in rows:
            found.append(row)
            size += len(row.body) if isinstance(row, Row) else 0
            if len(found) == _AT_ONCE or size >= _BYTES:
                break
    except StartupError as error:
        return found, error
    return found, None


def _raise_first(task: asyncio.Task[None]) -> None:
    """Raise the exception that a task ended with, if any; of a group of exceptions, the first."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error
