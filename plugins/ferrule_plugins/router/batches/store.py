"""The store: uploaded files, batches with their inputs and journals, and the limits of all together."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from ferrule import log
from ferrule.errors import ConfigError, NotFoundError, OverloadedError, TooLargeError, UnavailableError
from ferrule_plugins.router.batches.objects import Objects, Stored
from ferrule_plugins.router.batches.options import StoreOptions
from ferrule_plugins.router.batches.usage import Tokens

CONTENT = "content"
INPUT = "input"
JOURNAL = "journal"
_CANCEL = "cancel"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

LIVE = frozenset({"validating", "in_progress", "finalizing", "cancelling"})  # statuses of batches that have not ended
CANCELLABLE = LIVE | {"cancelled"}

_logger = log.get("batches")


class FileRecord(Stored):
    """A stored file. Its content is beside the record."""

    filename: str  # as the client calls it; no path is made of it
    purpose: str
    bytes: int


class Fault(msgspec.Struct, frozen=True):
    """A reason why a batch failed, as OpenAI has it."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(Stored):
    """A batch. Only the process that has claimed it writes its record; `expires` is the end of its window.

    Times ending in `_at` are in seconds since 1970, None as long as that has not happened.
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None
    output_seconds: int | None  # seconds that output files are kept
    model: str
    status: str = "validating"
    end: str = ""  # the status in which the batch ends, once that is decided
    total: int = 0
    completed: int = 0
    failed: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[Fault] = []
    tokens: Tokens | None = None  # once the batch has ended

    @property
    def ended_at(self) -> int | None:
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at


class Store:
    """All files and batches. Methods block: they are called from threads."""

    def __init__(self, folder: Path, options: StoreOptions, clock: Callable[[], int] = time.time_ns) -> None:
        """Make the folders. Raises OSError."""
        self.clock = clock
        self._options = options
        self.files: Objects[FileRecord] = Objects(folder / "files", "file-", FileRecord)
        self.batches: Objects[BatchRecord] = Objects(folder / "batches", "batch_", BatchRecord)

    @property
    def now(self) -> int:
        """Seconds since 1970."""
        return self.clock() // 10**9

    # ------------------------------------------------------------------------------------------------------- files

    @contextmanager
    def receiving(self, num_bytes: int) -> Iterator[tuple[Path, BinaryIO]]:
        """Open a file of at most `num_bytes` bytes to be filled. Its size is reserved until the block ends.

        Raises TooLargeError if the store has no room for it, UnavailableError if the disk has none.
        """
        with disk_errors(), contextlib.ExitStack() as stack:
            path = stack.enter_context(self.files.building())
            file = stack.enter_context((path / CONTENT).open("xb"))
            with self.files.exclusive():
                if len(self.files.ids()) >= self._options.max_files:
                    raise TooLargeError(f"The server has {self._options.max_files} files, its limit. Delete some.")
                used = sum((self.files.sizes() | self.batches.sizes()).values())
                if used + num_bytes > self._options.max_bytes:
                    raise TooLargeError("The server's room for files is used up. Delete some.", "file")
                os.truncate(file.fileno(), num_bytes)
            yield path, file

    def keep(self, path: Path, file: BinaryIO, record: FileRecord) -> FileRecord:
        """Make a file that was filled one of the store. Raises UnavailableError if the disk is full."""
        with disk_errors():
            _settle(file)
            self.files.finish(path, msgspec.structs.replace(record, bytes=os.fstat(file.fileno()).st_size))
        found = self.files.read(record.id)
        if found is None:
            raise UnavailableError("The file could not be stored.")
        return found

    def new_file(self, key: str, filename: str, purpose: str, seconds: int | None = None) -> FileRecord:
        """Return the record of a file that is new, for at most so many seconds."""
        created = self.clock()
        kept = min(seconds or self._options.max_age, self._options.max_age)
        return FileRecord(
            id=self.files.new_id(),
            key=key,
            created=created,
            expires=created // 10**9 + kept,
            filename=filename,
            purpose=purpose,
            bytes=0,
        )

    def file(self, id: str, key: str, param: str | None = None) -> FileRecord:
        """Return a file of this key. Raises NotFoundError."""
        record = self.files.read(id)
        if record is None or record.key != key or record.expires <= self.now:
            raise NotFoundError(f"There is no file {id[:64]!r}.", param)
        return record

    def remove_file(self, record: FileRecord) -> None:
        """Remove a file. Raises NotFoundError if another call has, UnavailableError."""
        with disk_errors():
            if not self.files.remove(record.id):
                raise NotFoundError(f"There is no file {record.id!r}.")

    def content(self, record: FileRecord) -> Path:
        return self.files.path(record.id) / CONTENT

    def publish(self, batch: BatchRecord, kind: str, lines: Iterable[bytes]) -> str | None:
        """Write lines as a file of a batch, `kind` output or error; return its id, or None without a line.

        A second call for the same batch and kind writes nothing. Raises OSError.
        """
        digest = hashlib.sha256(f"{batch.id}/{kind}".encode()).hexdigest()[:32]
        record = self.new_file(batch.key, f"{batch.id}_{kind}.jsonl", "batch_output", batch.output_seconds)
        record.id = f"file-{digest}"
        if self.files.read(record.id) is not None:
            return record.id
        with self.files.building() as path, (path / CONTENT).open("xb") as file:
            for line in lines:
                file.write(line)
            _settle(file)
            record.bytes = file.tell()
            if not record.bytes:
                return None
            self.files.finish(path, record)
        return record.id

    # ----------------------------------------------------------------------------------------------------- batches

    def begin(self, record: BatchRecord, source: FileRecord) -> None:
        """Store a new batch with its own name for the content of its input, which may be deleted from then on.

        When there are too many batches, the one that ended first is forgotten; its output files stay. Raises
        OverloadedError when none has ended, NotFoundError when the input is gone, UnavailableError.
        """
        with disk_errors(), self.batches.building() as path:
            if len(self.batches.ids()) >= self._options.max_files:
                ended = [one for one in self.batches.records() if one.ended_at is not None]
                if not ended:
                    raise OverloadedError(f"{self._options.max_files} batches run or wait, which is the limit.", 60)
                self.batches.remove(min(ended, key=lambda one: one.ended_at or 0).id)
            try:
                os.link(self.content(source), path / INPUT)
            except FileNotFoundError:
                raise NotFoundError(f"There is no file {source.id!r}.", "input_file_id") from None
            self.batches.finish(path, record)

    def batch(self, id: str, key: str) -> BatchRecord:
        """Return a batch of this key. Raises NotFoundError."""
        record = self.batches.read(id)
        if record is None or record.key != key:
            raise NotFoundError(f"There is no batch {id[:64]!r}.")
        return self.as_asked(record)

    def as_asked(self, record: BatchRecord) -> BatchRecord:
        """Return the record with the wish to cancel, which may not have come to the process that runs the batch."""
        if record.status not in LIVE or (asked := self.cancel_asked(record.id)) is None:
            return record
        return msgspec.structs.replace(record, status="cancelling", cancelling_at=asked)

    def cancel(self, record: BatchRecord) -> None:
        """Ask that a batch be cancelled, whichever process runs it. Does nothing if that was asked before.

        The wish is an empty file, so that a disk that is full has room for it. Raises UnavailableError.
        """
        with disk_errors(), contextlib.suppress(FileExistsError):
            (self.batches.path(record.id) / _CANCEL).touch(exist_ok=False)

    def cancel_asked(self, id: str) -> int | None:
        """Return when a batch was asked to be cancelled, in seconds since 1970, if it was."""
        try:
            return int((self.batches.path(id) / _CANCEL).stat().st_mtime)
        except (OSError, ValueError):
            return None

    def tidy(self, record: BatchRecord) -> None:
        """Remove what an ended batch needs no more."""
        for name in (INPUT, JOURNAL):
            (self.batches.path(record.id) / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what has expired, and the rest of what was being written when a process was killed. Raises OSError."""
        now = self.now
        self.files.sweep()
        self.batches.sweep()
        for file in self.files.records():
            if file.expires <= now:
                self.files.remove(file.id)
        for batch in self.batches.records():
            if (ended := batch.ended_at) is not None and ended + self._options.max_age <= now:
                self.batches.remove(batch.id)


def open_store(folder: str, options: StoreOptions) -> Store:
    """Open the store in a folder, which is made if need be. Raises ConfigError."""
    try:
        store = Store(Path(folder).expanduser(), options)
        with store.files.building() as file, store.batches.building() as batch:
            (file / CONTENT).touch()
            os.link(file / CONTENT, batch / INPUT)  # as `begin` does
    except OSError as error:
        raise ConfigError(
            f"--plugin-config.router:batches.folder {folder}: {os.strerror(error.errno or 0)}.",
            "Name a folder that the server can write to, on a file system that has hard links.",
        ) from None
    return store


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn an error of the disk within the block into the error of a request, and tell the operator.

    Raises UnavailableError.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        _logger.error("the folder of files and batches cannot be written: %s", error)
        said = "The server's disk for files is full." if full else "The server cannot write its files at the moment."
        raise UnavailableError(said, retry_after=60) from None


def _settle(file: BinaryIO) -> None:
    """Cut a file after what was written, and return when the disk has it."""
    file.flush()
    os.truncate(file.fileno(), file.tell())
    os.fsync(file.fileno())
