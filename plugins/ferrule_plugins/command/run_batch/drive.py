"""The work of a batch: a window of requests in flight, and a writer that puts their results into the journal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from ferrule import log
from ferrule.errors import EngineDead
from ferrule_plugins.command.run_batch.journal import Journal, Record
from ferrule_plugins.command.run_batch.progress import Progress
from ferrule_plugins.command.run_batch.rows import AppResponse, Bad, Row, answered, refused

_TRIES = 5  # times that a row is turned away while no other one is answered
_BUSY = (429, 503)
_REFUSED = 400

_logger = log.get("batch")


@dataclass(frozen=True)
class Asker:
    """The application's side of a batch: `ask` answers a row, `alive` tells after an error of the server whether the
    engine still runs.
    """

    ask: Callable[[str, bytes], Awaitable[AppResponse]]
    alive: Callable[[], bool]


class Drive:
    """One run: requests in flight, and a writer of their results.

    `stopping` ends the sending of rows; the requests that run then get `grace` seconds, or until `insisted`.
    """

    def __init__(self, asker: Asker, journal: Journal, progress: Progress, window: int) -> None:
        self.stopping = asyncio.Event()
        self.insisted = asyncio.Event()
        self._asker = asker
        self._journal = journal
        self._progress = progress
        self._slots = asyncio.Semaphore(window)
        self._running = 0
        self._answered = 0
        self._results: asyncio.Queue[Record | None] = asyncio.Queue()

    async def run(self, rows: Iterator[Row | Bad], grace: float) -> None:
        """Return when all rows are done, or when the run was stopped. Raises EngineDead, StartupError.

        However the run ends, the results that had come are in the journal.
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
        _logger.info("stopping: what runs is finished first", running=self._running, timeout=grace)
        await asyncio.wait({feeding, writing, insisted}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        insisted.cancel()

    async def _feed(self, rows: Iterator[Row | Bad]) -> None:
        async with asyncio.TaskGroup() as group:
            for row in rows:
                await self._slots.acquire()
                if self.stopping.is_set():
                    break
                if isinstance(row, Bad):
                    self._results.put_nowait(Record(row.number, _REFUSED, refused(row)))
                    continue
                self._running += 1
                group.create_task(self._one(row))

    async def _one(self, row: Row) -> None:
        try:
            answer = await self._answer(row)
        finally:
            self._running -= 1
        self._results.put_nowait(Record(row.number, answer.status, answered(row, answer)))

    async def _answer(self, row: Row) -> AppResponse:
        """Return the final answer of a row: a row that a full queue turns away is sent again, as long as others are
        answered.

        Raises EngineDead.
        """
        tries = 0
        while True:
            before = self._answered
            answer = await self._asker.ask(row.url, row.body)
            if answer.status >= 500 and not self._asker.alive():
                raise EngineDead("The engine has stopped.")
            if answer.status not in _BUSY or tries == _TRIES:
                self._answered += 1
                return answer
            await asyncio.sleep(answer.retry_after)
            tries += self._answered == before

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
                self._slots.release()
                self._progress.step(failed=record.status != 200)


def _raise_first(task: asyncio.Task[None]) -> None:
    """Raise the exception that a task ended with, if any; of a group of exceptions, the first."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error
