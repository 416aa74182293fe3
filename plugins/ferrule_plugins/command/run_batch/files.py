"""The input and the output of a batch: local files or URLs."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ferrule.errors import StartupError
from ferrule_plugins.batch.journal import Journal, cannot_write, sync_folder
from ferrule_plugins.command.run_batch.transfer import download, is_url, shown, upload


class Target:
    """The output. A file under its name is always either the former file or the whole new one."""

    def __init__(self, where: str, tmp_dir: str | None) -> None:
        """Check that results can be written to `where`. Raises StartupError."""
        self._where = where
        self._url = is_url(where)
        self.shown = shown(where) if self._url else where
        self._path = Path(self.shown if self._url else os.path.realpath(where))
        if self._url:
            self.folder = Path(tmp_dir or tempfile.gettempdir())
        else:
            self.folder = Path(tmp_dir) if tmp_dir else self._path.parent
            self._check_path()
        if not self.folder.is_dir():
            raise StartupError(f"There is no folder {self.folder} for the journal.")
        beside = not self._url and not tmp_dir
        key = hashlib.sha256(str(self._path).encode()).hexdigest()[:16]
        self.journal = self.folder / (f"{self._path.name}.journal" if beside else f"run-batch-{key}.journal")

    def _check_path(self) -> None:
        folder = self._path.parent
        if not folder.is_dir():
            raise StartupError(f"There is no folder {folder} for the output.")
        if not os.access(folder, os.W_OK):
            raise StartupError(f"The folder {folder} of the output cannot be written to.")
        if self._path.exists() and not self._path.is_file():
            raise StartupError(
                f"{self._where} is not a regular file.", "The output is created by renaming a finished file."
            )

    def is_file(self, file: BinaryIO) -> bool:
        """Return whether the open file is the one that the output would replace."""
        return not self._url and self._path.exists() and os.path.samestat(os.fstat(file.fileno()), self._path.stat())

    def publish(self, journal: Journal) -> None:
        """Write all results to the output, in the order of the input. Raises StartupError; the journal is left
        alone.
        """
        if self._url:
            with _unnamed(self.folder) as file:
                self._copy(journal, file)
                upload(file, self._where)
            return
        temporary = self._path.with_name(f".{self._path.name}.part")
        try:
            with temporary.open("wb") as file:
                self._copy(journal, file)
                os.fsync(file.fileno())
            temporary.replace(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise cannot_write(self._path, error) from None

    def _copy(self, journal: Journal, file: BinaryIO) -> None:
        try:
            for result in journal.results():
                file.write(result)
            file.flush()
        except OSError as error:
            raise cannot_write(self._path, error) from None


@contextmanager
def opened(where: str, folder: Path, most: int) -> Iterator[BinaryIO]:
    """Open the input for reading; the content of a URL is fetched into a file without a name. Raises StartupError."""
    if is_url(where):
        with _unnamed(folder) as file:
            try:
                download(where, file, most)
            except OSError as error:
                raise cannot_write(folder, error) from None
            yield file
        return
    try:
        file = open(where, "rb")  # noqa: SIM115 - closed below
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise StartupError(f"The input {where} is not a regular file.", "It is read twice.")
    except OSError as error:
        raise StartupError(f"Cannot read the input {where}: {os.strerror(error.errno or 0).lower()}.") from None
    with file:
        yield file


@contextmanager
def _unnamed(folder: Path) -> Iterator[BinaryIO]:
    """Open a file that is gone with this process, however it ends. Raises StartupError."""
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed below
    except OSError as error:
        raise cannot_write(folder, error) from None
    with file:
        yield file
