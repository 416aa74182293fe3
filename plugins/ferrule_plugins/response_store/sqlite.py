"""`sqlite`: responses in a SQLite file, which all API processes share.

With the option `path` they outlive the server, and a process that is killed. Without it the file is a temporary one.
The file has a write-ahead log (https://www.sqlite.org/wal.html), so it must be on a local disk: what was committed
survives the death of the process, and the last moments before a loss of power may be missing.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
from msgspec import Meta

from ferrule import log
from ferrule.errors import RequestFailed, StartupError
from ferrule.interfaces.response_store import ResponseStore, StoredResponse
from ferrule_plugins.response_store.bounds import MOST_EVENTS, OVERHEAD, Bounds, size_of

_logger = log.get("responses")

_FORM = 1  # of the tables; kept in the file
_PATIENCE = 10.0  # seconds to wait for another process that writes
_IMPATIENCE = 0.1  # the same, after the wait was in vain: requests would wait for each other's waits
_REASONS = (("SQLITE_FULL", "its disk is full"), ("SQLITE_BUSY", "another process locks its file"))
_NO_REASON = "its file cannot be read or written"
# `totals` has one row, so that bounds need no scan: triggers keep it.
_TABLES = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, id TEXT NOT NULL, parent TEXT, created REAL NOT NULL,
    ended INTEGER NOT NULL, process TEXT NOT NULL, items BLOB NOT NULL, response BLOB NOT NULL, size INTEGER NOT NULL,
    UNIQUE (owner, id)
);
CREATE INDEX by_age ON responses (created);
CREATE TABLE events (
    response INTEGER NOT NULL REFERENCES responses (number) ON DELETE CASCADE, number INTEGER NOT NULL,
    event BLOB NOT NULL, PRIMARY KEY (response, number)
) WITHOUT ROWID;
CREATE TABLE totals (count INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER added AFTER INSERT ON responses
    BEGIN UPDATE totals SET count = count + 1, bytes = bytes + NEW.size; END;
CREATE TRIGGER deleted AFTER DELETE ON responses
    BEGIN UPDATE totals SET count = count - 1, bytes = bytes - OLD.size; END;
CREATE TRIGGER resized AFTER UPDATE OF size ON responses
    BEGIN UPDATE totals SET bytes = bytes + NEW.size - OLD.size; END;
"""


@dataclass(frozen=True)
class SqliteOptions(Bounds):
    """A store's file and its bounds."""

    path: Annotated[str, Meta(description="The file, on a local disk. Empty: a temporary one.")] = ""


class SqliteStore(ResponseStore):
    Options = SqliteOptions
    conformance = "ferrule_plugins.response_store.bounds:CONFORMANCE"
    shared = True

    def __init__(self, folder: Path | None, *, options: SqliteOptions) -> None:
        super().__init__(folder)
        self._bounds = options
        self._process = _process_name()
        self._patience = _PATIENCE
        path = Path(options.path).expanduser() if options.path else folder and folder / "responses.sqlite"
        try:
            self._db = _opened(path)
        except (OSError, sqlite3.Error) as error:
            raise StartupError(
                f"The response store {path or 'in a temporary file'} cannot be opened: {error}.",
                "The option path of response_store:sqlite names a file that this server may write.",
            ) from error

    def add(self, response: StoredResponse) -> bool:
        size = size_of(response)
        self._bounds.check(size)
        with self._transaction() as db:
            self._evict(db)
            row = (response.owner, response.id, response.parent, response.created, response.ended, self._process)
            added = db.execute(
                "INSERT OR IGNORE INTO responses (owner, id, parent, created, ended, process, items, response, size) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, response.items, response.response, size),
            )
            self._evict(db)
            return added.rowcount == 1

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        with self._guarded() as db:
            row = db.execute(
                "SELECT parent, created, ended, process, items, response FROM responses "
                "WHERE owner = ? AND id = ? AND created > ?",
                (owner, response_id, self._oldest()),
            ).fetchone()
        if row is None:
            return None
        parent, created, ended, process, items, response = row
        return StoredResponse(
            id=response_id,
            owner=owner,
            parent=parent,
            created=created,
            ended=bool(ended),
            items=items,
            response=response,
            abandoned=not ended and process != self._process and not _lives(process),
        )

    def update(self, response: StoredResponse) -> bool:
        with self._transaction() as db:
            found = self._running(db, response.owner, response.id)
            if found is None:
                return False
            number, size, old = found
            size += size_of(response) - old
            self._bounds.check(size)
            db.execute(
                "UPDATE responses SET ended = ?, items = ?, response = ?, size = ? WHERE number = ?",
                (response.ended, response.items, response.response, size, number),
            )
            self._evict(db)
            return True

    def delete(self, owner: str, response_id: str) -> bool:
        with self._transaction() as db:
            found = db.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, response_id))
            return found.rowcount == 1

    def append(self, owner: str, response_id: str, events: Sequence[bytes]) -> bool:
        with self._transaction() as db:
            found = self._running(db, owner, response_id)
            if found is None:
                return False
            number, size, _ = found
            size += sum(map(len, events))
            self._bounds.check(size)
            (first,) = db.execute(
                "SELECT coalesce(max(number) + 1, 0) FROM events WHERE response = ?", (number,)
            ).fetchone()
            db.executemany(
                "INSERT INTO events VALUES (?, ?, ?)",
                [(number, place, event) for place, event in enumerate(events, first)],
            )
            db.execute("UPDATE responses SET size = ? WHERE number = ?", (size, number))
            self._evict(db)
            return True

    def events(self, owner: str, response_id: str, start: int) -> Sequence[bytes]:
        with self._guarded() as db:
            rows = db.execute(
                "SELECT event FROM events WHERE response = (SELECT number FROM responses WHERE owner = ? AND id = ?) "
                "AND number >= ? ORDER BY number LIMIT ?",
                (owner, response_id, start, MOST_EVENTS),
            )
            return [event for (event,) in rows]

    def close(self) -> None:
        self._db.close()

    def _running(self, db: sqlite3.Connection, owner: str, response_id: str) -> tuple[int, int, int] | None:
        """Return number, size and size without events of a response that has not ended; None where there is none."""
        row = db.execute(
            "SELECT number, size, length(items), length(response) FROM responses "
            "WHERE owner = ? AND id = ? AND NOT ended",
            (owner, response_id),
        ).fetchone()
        if row is None:
            return None
        number, size, items, response = row
        return number, size, items + response + OVERHEAD

    def _evict(self, db: sqlite3.Connection) -> None:
        """Let go of what is too old, and of the oldest beyond the bounds."""
        db.execute("DELETE FROM responses WHERE created <= ?", (self._oldest(),))
        while True:
            count, size = db.execute("SELECT count, bytes FROM totals").fetchone()
            if count <= self._bounds.max_responses and size <= self._bounds.max_bytes:
                return
            db.execute("DELETE FROM responses WHERE number = (SELECT min(number) FROM responses)")

    def _oldest(self) -> float:
        return time.time() - self._bounds.max_age

    def _wait_for_others(self, seconds: float) -> None:
        if seconds != self._patience:
            self._patience = seconds
            self._db.execute(f"PRAGMA busy_timeout = {int(1000 * seconds)}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Change the file wholly or not at all."""
        with self._guarded() as db:
            db.execute("BEGIN IMMEDIATE")
            self._wait_for_others(_PATIENCE)
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # after some errors SQLite has gone back by itself
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def _guarded(self) -> Iterator[sqlite3.Connection]:
        """Raise RequestFailed for whatever is wrong with the file; the log says more."""
        try:
            yield self._db
        except sqlite3.Error as error:
            _logger.error("the response store failed: %s", error)
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith("SQLITE_BUSY"):
                self._wait_for_others(_IMPATIENCE)
            why = next((why for start, why in _REASONS if name.startswith(start)), _NO_REASON)
            raise RequestFailed(
                f"The response store failed: {why}. Requests with store false do not need it."
            ) from error


def _opened(path: Path | None) -> sqlite3.Connection:
    """Open the file, and make its tables where it is new. Raises OSError, sqlite3.Error; StartupError for a file of
    another form.
    """
    if path is not None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # conversations are nobody else's
    # `check_same_thread`: it is opened at the start, and used on one thread later.
    db = sqlite3.connect(path or "", timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("BEGIN IMMEDIATE")  # of several processes that start together, one makes the tables
    (form,) = db.execute("PRAGMA user_version").fetchone()
    if form == 0:
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
            raise StartupError(
                f"{path} is another program's database.", "Name a new file as response_store:sqlite's path."
            )
        for statement in _statements(_TABLES):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {_FORM}")
    db.execute("COMMIT")
    if form not in (0, _FORM):
        raise StartupError(
            f"{path} has responses in form {form}; this version reads form {_FORM}.", "Delete it, or name another file."
        )
    return db


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script, of which each begins with CREATE or INSERT at the start of a line."""
    lines: list[str] = []
    for line in script.strip().splitlines():
        if lines and line.startswith(("CREATE", "INSERT")):
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def _process_name() -> str:
    """Return a name of this process that no other process on this machine ever has."""
    return f"{os.getpid()} {psutil.Process().create_time()}"


def _lives(process: str) -> bool:
    """Return whether a process, by its name, still runs."""
    pid, _, since = process.partition(" ")
    try:
        return str(psutil.Process(int(pid)).create_time()) == since
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
