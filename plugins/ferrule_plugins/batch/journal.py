"""The journal: results of a run that may be killed at any time.

Beside the output, or in the folder that was named, stands `NAME.journal`. Its first line says what run it is of; each
further line is `LINE STATUS RESULT`, written and fsynced in groups. A line without its end, or one that is damaged,
and all behind it were never promised: they are cut off when the run goes on. One process has the journal at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ferrule.errors import StartupError

_FORMAT = 1
_SERVER_FAULT = 500


@dataclass(frozen=True)
class Record:
    """The result of one line of the input."""

    number: int
    status: int
    result: bytes  # JSON without a line end

    @property
    def line(self) -> bytes:
        return b"%d %d %s\n" % (self.number, self.status, self.result)


class Journal:
    """A file with the results so far; `number in journal` tells whether a line of the input is done.

    A line whose result has status 500 or more is not done unless `faults_count`: the fault was ours, and the line is
    tried again when a run goes on. `append` may run on another thread than the other methods, one call at a time.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], lines: int, faults_count: bool = False) -> None:
        """Open or create the file. `run` has the JSON values, by name, that tell runs apart. Raises StartupError."""
        self.path = path
        self._faults_count = faults_count
        self._places = array("q", bytes(8 * (lines + 1)))  # of each line's result in the file; 0: not done
        self.done = 0
        self.failed = 0  # of them with a status other than 200
        self._file = _open(path)
        try:
            self._size = self._read(msgspec.to_builtins({"format": _FORMAT, **run}))
        except BaseException:
            self._file.close()
            raise

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self._places[number] > 0

    def append(self, records: Sequence[Record]) -> None:
        """Write records, and return when the disk has them. Raises StartupError; former records stay valid."""
        data = b"".join(record.line for record in records)
        try:
            _write(self._file.fileno(), data, self._size)
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._size)
            raise cannot_write(self.path, error) from None
        for record in records:
            self._note(record.number, record.status, self._size + record.line.index(b"{"))
            self._size += len(record.line)

    def results(self) -> Iterator[bytes]:
        """Yield the results in the order of the input, each with its line end."""
        with os.fdopen(os.dup(self._file.fileno()), "rb") as file:  # its own buffer: it sees what append wrote
            for place in self._places:
                if place:
                    file.seek(place)
                    yield file.readline()

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Delete the file, once the results are written elsewhere."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _note(self, number: int, status: int, place: int) -> None:
        self.done += not self._places[number]
        self.failed += status != 200
        self._places[number] = place

    def _read(self, run: dict[str, Any]) -> int:
        """Read the records of a former run and cut off a broken end; return the size of the file after that, in
        bytes.
        """
        head = self._file.readline()
        if not head.endswith(b"\n"):  # new, or killed while it was made
            head = msgspec.json.encode(run) + b"\n"
            try:
                os.ftruncate(self._file.fileno(), 0)
                _write(self._file.fileno(), head, 0)
                os.fsync(self._file.fileno())
                sync_folder(self.path.parent)
            except OSError as error:
                raise cannot_write(self.path, error) from None
            return len(head)
        self._check_run(head, msgspec.json.decode(msgspec.json.encode(run)))
        size = len(head)
        for line in self._file:
            record = _parse(line, len(self._places))
            if record is None:
                break
            if record.status < _SERVER_FAULT or self._faults_count:
                self._note(record.number, record.status, size + line.index(b"{"))
            size += len(line)
        os.ftruncate(self._file.fileno(), size)
        return size

    def _check_run(self, head: bytes, run: dict[str, Any]) -> None:
        try:
            found = msgspec.json.decode(head, type=dict[str, Any])
        except ValueError:
            raise StartupError(
                f"{self.path} exists where the journal should be written, but is not a journal.",
                "Move it away, or name another --output-tmp-dir.",
            ) from None
        names = [name for name in {**found, **run} if found.get(name) != run.get(name)]
        if names:
            differences = "; ".join(f"{name} was {found.get(name)!r:.100}, is {run.get(name)!r:.100}" for name in names)
            raise StartupError(
                f"{self.path} is the journal of a run that did not end, with something else: {differences}.",
                "Use the former options to continue, or delete the journal to start again.",
            )


def cannot_write(path: Path, error: OSError) -> StartupError:
    return StartupError(
        f"Cannot write {path}: {os.strerror(error.errno or 0).lower()}.",
        "Finished results are in the journal: run the same command again to continue.",
    )


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open(path: Path) -> BinaryIO:
    """Return the file, opened and locked by this process only. Raises StartupError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise StartupError(
            f"Cannot write the journal {path}: {os.strerror(error.errno or 0).lower()}.",
            "Use --output-tmp-dir to choose another folder for it.",
        ) from None
    mine = os.fstat(fd)
    if not stat.S_ISREG(mine.st_mode) or mine.st_uid != os.geteuid():
        os.close(fd)
        raise StartupError(
            f"{path} is not a regular file of this user.",
            "Use --output-tmp-dir to choose another folder for the journal.",
        )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # a run that ended just now has removed what we opened
        still = path.exists() and os.path.samestat(path.stat(), mine)
    except OSError:
        still = False
    if not still:
        os.close(fd)
        raise StartupError(
            f"Another run-batch is writing {path}.", "Wait until it has finished, or name another output."
        )
    return os.fdopen(fd, "r+b")


def _write(fd: int, data: bytes, place: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, place)
        view, place = view[count:], place + count


def _parse(line: bytes, most: int) -> Record | None:
    """Parse a line of the file; return None for one that is cut off or not valid."""
    parts = line.split(b" ", 2)
    if len(parts) != 3 or not line.endswith(b"}\n") or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    try:
        msgspec.json.decode(parts[2], type=dict[str, Any])
    except (ValueError, RecursionError):
        return None
    number = int(parts[0])
    return Record(number, int(parts[1]), parts[2]) if 0 < number < most else None
