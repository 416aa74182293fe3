"""Responses as files: one for each response, with its events."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ferrule.errors import RequestFailed
from ferrule.interfaces.response_store import ResponseStore, StoredResponse


@dataclass(frozen=True)
class Options:
    path: Annotated[str, Meta(description="The folder. Empty: a temporary one.")] = ""


class Kept(Struct):
    """The content of a file."""

    response: StoredResponse
    events: list[bytes] = []


class ExampleStore(ResponseStore):
    Options = Options
    shared = True

    def __init__(self, folder: Path | None, *, options: Options) -> None:
        super().__init__(folder)
        self._folder = Path(options.path or folder or tempfile.mkdtemp()) / "responses"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def add(self, response: StoredResponse) -> bool:
        with self._locked():
            path = self._path(response.owner, response.id)
            if path.exists():
                return False
            self._write(path, Kept(response))
            return True

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        kept = self._read(owner, response_id)
        return None if kept is None else kept.response

    def update(self, response: StoredResponse) -> bool:
        with self._locked():
            kept = self._read(response.owner, response.id)
            if kept is None or kept.response.ended:
                return False
            self._write(self._path(response.owner, response.id), Kept(response, kept.events))
            return True

    def delete(self, owner: str, response_id: str) -> bool:
        with self._locked():
            path = self._path(owner, response_id)
            there = path.exists()
            path.unlink(missing_ok=True)
            return there

    def append(self, owner: str, response_id: str, events: Sequence[bytes]) -> bool:
        with self._locked():
            kept = self._read(owner, response_id)
            if kept is None or kept.response.ended:
                return False
            self._write(self._path(owner, response_id), Kept(kept.response, [*kept.events, *events]))
            return True

    def events(self, owner: str, response_id: str, start: int) -> Sequence[bytes]:
        kept = self._read(owner, response_id)
        return () if kept is None else kept.events[start:]

    def close(self) -> None:
        """Nothing is open between two calls."""

    def _path(self, owner: str, response_id: str) -> Path:
        return self._folder / hashlib.sha256(f"{owner}\0{response_id}".encode()).hexdigest()

    def _read(self, owner: str, response_id: str) -> Kept | None:
        try:
            return msgspec.msgpack.decode(self._path(owner, response_id).read_bytes(), type=Kept)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RequestFailed(f"The stored responses cannot be read: {error.strerror}.") from error

    def _write(self, path: Path, kept: Kept) -> None:
        """Replace a file at once: a reader sees all of it or nothing."""
        new = path.with_suffix(".new")
        try:
            new.write_bytes(msgspec.msgpack.encode(kept))
            os.replace(new, path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise RequestFailed(f"The response cannot be stored: {error.strerror}.") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep out other processes."""
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
