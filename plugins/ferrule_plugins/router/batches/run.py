"""One batch, from the state in which it is found to its end. See `work` for the states."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from ferrule_plugins.batch.drive import Asker, Drive
from ferrule_plugins.batch.journal import Journal, Record
from ferrule_plugins.batch.rows import Bad, Row, not_run, refused, succeeded
from ferrule_plugins.batch.source import Survey, read_rows, survey
from ferrule_plugins.router.batches.store import INPUT, JOURNAL, BatchRecord, Fault, Store
from ferrule_plugins.router.batches.usage import tokens_of

_LOOK = 0.2  # seconds between two looks at the batch's wish to end
_TELL = 2.0  # seconds between two updates of the counts on disk
_GRACE = 30.0  # seconds that requests in flight get when their batch is cancelled or expires
_GROUP = 256  # results that are written at a time
_FAULTS = 100  # lines that a failed batch tells
_NOT_SENT = 409  # status in the journal of a line that was never sent
_REASONS = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was sent."),
    "expired": ("batch_expired", "The completion window ended before this request was sent."),
}


class Run:
    """The run of one batch by the process that has claimed it."""

    def __init__(
        self,
        id: str,
        store: Store,
        asker: Callable[[str, str], Asker],
        window: Callable[[], int],
        max_body_bytes: int,
        max_lines: int,
    ) -> None:
        self.id = id
        self.ended = False
        self._store = store
        self._asker = asker
        self._window = window
        self._max_lines = max_lines
        self._max_body_bytes = max_body_bytes
        self._drive: Drive | None = None

    async def work(self, serves: Callable[[], bool]) -> None:
        """Run the batch until it has ended, or until `serves` returns False.

        Raises EngineDead, OSError and StartupError; then what was done is on disk.
        """
        record = await asyncio.to_thread(self._store.batches.read, self.id)
        if record is None or record.ended_at is not None:
            self.ended = True
            return
        with (self._store.batches.path(self.id) / INPUT).open("rb") as file:
            seen = await asyncio.to_thread(survey, file, self._max_body_bytes)
            if record.in_progress_at is None and not await asyncio.to_thread(self._validate, record, file, seen):
                self.ended = True
                return
            journal = await asyncio.to_thread(self._open, seen)
            with contextlib.closing(journal):
                if not await self._answer(record, file, seen, journal, serves):
                    return
                await asyncio.to_thread(self._finish, record, journal)
        self.ended = True

    def _open(self, seen: Survey) -> Journal:
        path = self._store.batches.path(self.id) / JOURNAL
        return Journal(path, {"input_sha256": seen.sha256}, seen.lines, faults_count=True)

    def _rows(self, record: BatchRecord, file: BinaryIO, seen: Survey, done: object) -> Iterator[Row | Bad]:
        return read_rows(file, seen, done, {record.endpoint}, self._max_body_bytes)  # type: ignore[arg-type]

    def _validate(self, record: BatchRecord, file: BinaryIO, seen: Survey) -> bool:
        """Record that the batch is in progress, or that it has failed; return whether there is a line to send."""
        record.total = seen.rows
        record.errors = self._faults(record, file, seen)
        now = self._store.now
        if record.errors:
            record.status, record.failed_at = "failed", now
        else:
            record.status, record.in_progress_at = "in_progress", now
        self._store.batches.write(record)
        if record.errors:
            self._store.tidy(record)
        return not record.errors

    def _faults(self, record: BatchRecord, file: BinaryIO, seen: Survey) -> list[Fault]:
        """Return why nothing of an input can be sent; no fault if a line can."""
        if not seen.rows:
            return [Fault("empty_file", "The input file has no line.")]
        if seen.rows > self._max_lines:
            message = f"The input file has {seen.rows} lines; a batch may have {self._max_lines}."
            return [Fault("too_many_tasks", message)]
        faults: list[Fault] = []
        for row in self._rows(record, file, seen, ()):
            if isinstance(row, Row):
                return []
            if len(faults) < _FAULTS:
                faults.append(Fault(row.code, row.message, row.param, row.number))
        return faults

    async def _answer(
        self, record: BatchRecord, file: BinaryIO, seen: Survey, journal: Journal, serves: Callable[[], bool]
    ) -> bool:
        """Bring a result of every line into the journal; return False if the batch goes on later."""
        if not (record.end or self._due(record)):
            self._drive = Drive(self._asker(self.id, record.key), journal, _Uncounted(), self._window)
            over = asyncio.Event()
            watching = asyncio.create_task(self._watch(record, journal, over, serves))
            try:
                await self._drive.run(self._rows(record, file, seen, journal), _GRACE)
            finally:
                over.set()
                await watching  # it may be writing the record
                self._drive = None
        done = "completed" if journal.done == seen.rows else ""
        record.end = record.end or done or self._due(record)
        if record.end and journal.done < seen.rows:
            await asyncio.to_thread(self._store.batches.write, record)
            await asyncio.to_thread(self._give_up, record, file, seen, journal)
        return bool(record.end)

    def _due(self, record: BatchRecord) -> str:
        """Return the status in which the batch has to end before all of it is answered; "" if it has not."""
        if self._store.cancel_asked(self.id) is not None:
            return "cancelled"
        return "expired" if record.expires <= self._store.now else ""

    async def _watch(
        self, record: BatchRecord, journal: Journal, over: asyncio.Event, serves: Callable[[], bool]
    ) -> None:
        """Stop the drive when the batch has to end, or when this server does; tell its progress until it is `over`."""
        told = 0.0
        while serves() and not self._due(record) and not over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await over.wait()
            told += _LOOK
            if told >= _TELL and journal.done > record.completed + record.failed:
                told = 0.0
                await asyncio.to_thread(self._count, record, journal)
        if self._drive is not None:
            self._drive.stopping.set()

    def _count(self, record: BatchRecord, journal: Journal) -> None:
        record.completed, record.failed = journal.done - journal.failed, journal.failed
        with contextlib.suppress(OSError):  # the journal meets the same disk, and tells
            self._store.batches.write(record)

    def _give_up(self, record: BatchRecord, file: BinaryIO, seen: Survey, journal: Journal) -> None:
        """Write a result for each line that has none."""
        group: list[Record] = []
        for row in self._rows(record, file, seen, journal):
            result = refused(row) if isinstance(row, Bad) else not_run(row, *_REASONS[record.end])
            group.append(Record(row.number, _NOT_SENT, result))
            if len(group) == _GROUP:
                journal.append(group)
                group = []
        if group:
            journal.append(group)

    def _finish(self, record: BatchRecord, journal: Journal) -> None:
        """Write the output files, record the end, and remove what is needed no more."""
        record.completed, record.failed = journal.done - journal.failed, journal.failed
        record.finalizing_at = record.finalizing_at or self._store.now
        cancelled = record.end == "cancelled"
        record.cancelling_at = self._store.cancel_asked(self.id) if cancelled else None
        record.status = "cancelling" if cancelled else "finalizing"
        self._store.batches.write(record)
        record.tokens = tokens_of(filter(succeeded, journal.results()))
        record.output_file_id = self._store.publish(record, "output", filter(succeeded, journal.results()))
        bad = (line for line in journal.results() if not succeeded(line))
        record.error_file_id = self._store.publish(record, "error", bad)
        record.status = record.end
        setattr(record, f"{record.end}_at", self._store.now)
        self._store.batches.write(record)
        self._store.tidy(record)


class _Uncounted:
    """A counter that does nothing: the counts are those of the journal."""

    def step(self, failed: bool) -> None:
        pass
