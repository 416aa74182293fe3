"""Objects on disk: each is a folder with a `record.json`, and appears and disappears as a whole.

An object is built under another name, beside the finished ones, and then renamed. Its builder has a lock on it: a
folder under such a name that nobody has locked belonged to a process that was killed, and is removed. Names are made
here and never come from a client: an id is looked up only if it has the form of an id.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from ferrule import log
from ferrule_plugins.batch.journal import sync_folder

_RECORD = "record.json"
_UNFINISHED = ".new-"
_REMOVED = ".old-"

_logger = log.get("batches")


class Stored(msgspec.Struct, kw_only=True):
    """The fields that files and batches have in common. `created` is in nanoseconds, `expires` in seconds, both since
    1970.
    """

    id: str
    key: str  # name of the API key that made it; empty without keys
    created: int
    expires: int

    @property
    def created_at(self) -> int:
        return self.created // 10**9

    @property
    def order(self) -> tuple[int, str]:
        """The place in a list, from the oldest."""
        return self.created, self.id


T = TypeVar("T", bound=Stored)


class Objects(Generic[T]):
    """The objects of one type in a folder. All methods may be called by several threads and processes; they block."""

    def __init__(self, folder: Path, prefix: str, record: type[T]) -> None:
        """Make the folder. Raises OSError."""
        self.folder = folder
        self._prefix = prefix
        self._form = re.compile(re.escape(prefix) + "[0-9a-f]{32}")
        self._decoder = msgspec.json.Decoder(record)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def new_id(self) -> str:
        return self._prefix + secrets.token_hex(16)

    def path(self, id: str) -> Path:
        """Return the folder of an object. Raises ValueError for a text that is not an id."""
        if not self._form.fullmatch(id):
            raise ValueError("not an id")
        return self.folder / id

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Make a folder for the length of a block; what `finish` has not renamed by then is removed. Raises OSError."""
        path = self.folder / f"{_UNFINISHED}{secrets.token_hex(16)}"
        with self.exclusive():
            path.mkdir(mode=0o700)
            lock = _locked(path)
        try:
            yield path
        finally:
            try:
                shutil.rmtree(path, ignore_errors=True)
            finally:
                if lock is not None:
                    os.close(lock)

    def finish(self, path: Path, record: T) -> bool:
        """Write the record into a folder that was built, and make the folder appear under the record's id.

        Returns False if there is an object of that id already, which then stays as it is. Raises OSError.
        """
        self._write(path, record)
        try:
            path.rename(self.folder / record.id)
        except OSError:
            if not (self.folder / record.id / _RECORD).exists():
                raise
            return False
        sync_folder(self.folder)
        return True

    def write(self, record: T) -> None:
        """Replace the record of an object. Raises OSError, also if the object is gone."""
        self._write(self.path(record.id), record)

    def read(self, id: str) -> T | None:
        """Return the record of an object; None if there is none, or if it is damaged."""
        try:
            data = (self.path(id) / _RECORD).read_bytes()
        except (OSError, ValueError):
            return None
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError:
            _logger.error("the record of %s is damaged", id)
            return None

    def ids(self) -> list[str]:
        with os.scandir(self.folder) as entries:
            return [entry.name for entry in entries if self._form.fullmatch(entry.name)]

    def records(self) -> list[T]:
        """Return all records, from the oldest."""
        found = (self.read(id) for id in self.ids())
        return sorted((record for record in found if record is not None), key=lambda record: record.order)

    def remove(self, id: str) -> bool:
        """Remove an object; return whether this call did. Raises OSError."""
        gone = self.folder / f"{_REMOVED}{secrets.token_hex(16)}"
        try:
            self.path(id).rename(gone)
        except FileNotFoundError:
            return False
        sync_folder(self.folder)
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def sweep(self) -> None:
        """Remove what processes left that were killed while they built or removed an object."""
        with self.exclusive():
            for name in os.listdir(self.folder):
                path = self.folder / name
                if name.startswith(_REMOVED):
                    shutil.rmtree(path, ignore_errors=True)
                elif name.startswith(_UNFINISHED) and (lock := _locked(path)) is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other processes and threads out of such a block, for a moment. Raises OSError."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def claimed(self, id: str) -> Iterator[bool]:
        """Tell whether this block alone has the object, of all threads and processes. It has until it ends."""
        lock = _locked(self.path(id))
        try:
            yield lock is not None
        finally:
            if lock is not None:
                os.close(lock)

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each file by the number of its inode: a file with two names is one."""
        found = {}
        for name in os.listdir(self.folder):
            with contextlib.suppress(FileNotFoundError), os.scandir(self.folder / name) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    found[status.st_ino] = status.st_size
        return found

    def _write(self, folder: Path, record: T) -> None:
        temporary = folder / f".{_RECORD}-{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:
                file.write(msgspec.json.encode(record))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(folder / _RECORD)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(folder)


def _locked(folder: Path) -> int | None:
    """Return a descriptor that has a lock on a folder; None if another one has, or if the folder is gone."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
