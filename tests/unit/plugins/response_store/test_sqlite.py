"""Stores beyond what their kit asks: a file that survives, a full disk, a process that is gone, wrong files."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ferrule.errors import RequestFailed, StartupError
from ferrule.interfaces.response_store import StoredResponse
from ferrule_plugins.response_store import sqlite
from ferrule_plugins.response_store.bounds import Bounds
from ferrule_plugins.response_store.memory import MemoryStore
from ferrule_plugins.response_store.sqlite import SqliteOptions, SqliteStore

# Stores responses without end, and says which are stored. The last one never ends.
WRITER = """
import sys, time
from ferrule.interfaces.response_store import StoredResponse
from ferrule_plugins.response_store.sqlite import SqliteOptions, SqliteStore

store = SqliteStore(None, options=SqliteOptions(path=sys.argv[1], max_responses=100_000))
number = 0
while True:
    ended = number % 2 == 0
    store.add(StoredResponse(id=str(number), created=time.time(), ended=ended, response=b"x" * 1000))
    store.append("", str(number), [b"event"])
    print(number, flush=True)
    number += 1
"""


def response(name: str, **fields: Any) -> StoredResponse:
    given: dict[str, Any] = {"id": name, "created": time.time(), "response": b"{}"}
    return StoredResponse(**given | fields)


def opened(path: Path | str, **bounds: Any) -> SqliteStore:
    return SqliteStore(None, options=SqliteOptions(path=str(path), **bounds))


def test_what_was_stored_survives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(200)]
        here = opened(path)
        assert [getattr(here.get("", str(number)), "abandoned", None) for number in (0, 1)] == [False, False]
        writer.send_signal(signal.SIGKILL)
        told += [int(line) for line in writer.stdout if line.endswith("\n")]
    for number in told:
        found = here.get("", str(number))
        assert found is not None
        assert (found.ended, found.abandoned) == (number % 2 == 0, number % 2 == 1)
        assert list(here.events("", str(number), 0)) == ([] if found.ended else [b"event"])
    assert here.update(response("1", response=b"failed"))
    here.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_disk_is_the_error_of_a_request(tmp_path: Path) -> None:
    store = opened(tmp_path / "responses.sqlite")
    small = response("small", ended=False)
    assert store.add(small)
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 20}")
    big = b"x" * 1_000_000
    calls: list[Callable[[], bool]] = [
        lambda: store.add(response("big", response=big)),
        lambda: store.update(response("small", response=big)),
        lambda: store.append("", "small", [b"fits", big]),
    ]
    for doing in calls:
        with pytest.raises(RequestFailed, match="its disk is full"):
            doing()
    assert store.get("", "big") is None
    assert store.get("", "small") == small
    assert not store.events("", "small", 0)
    assert store.add(response("another"))
    store.close()


def test_a_locked_file_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail soon while another process keeps its lock, and be patient again afterwards. Reading needs no lock."""
    monkeypatch.setattr(sqlite, "_PATIENCE", 0.2)
    store = opened(tmp_path / "responses.sqlite")
    assert store.add(response("there"))
    other = sqlite3.connect(tmp_path / "responses.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for _ in range(2):
        with pytest.raises(RequestFailed, match="another process locks its file"):
            store.add(response("new"))
        assert store._db.execute("PRAGMA busy_timeout").fetchone() == (100,)
        assert store.get("", "there") is not None
    other.execute("ROLLBACK")
    assert store.add(response("new"))
    assert store._db.execute("PRAGMA busy_timeout").fetchone() == (200,)
    other.close()
    store.close()


def test_a_damaged_file_is_the_error_of_a_request(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    store = opened(path)
    for number in range(200):
        store.add(response(str(number), response=os.urandom(5000)))
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(os.urandom(path.stat().st_size - 8192))
    store._db.execute("PRAGMA shrink_memory")
    with pytest.raises(RequestFailed, match="its file cannot be read or written"):
        [store.get("", str(number)) for number in range(200)]
    store.close()


def test_wrong_files_stop_the_start(tmp_path: Path) -> None:
    text, other, later = (tmp_path / name for name in ("text", "other", "later"))
    text.write_text("no database " * 100)
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE mine (x)")
    opened(later).close()
    with sqlite3.connect(later) as db:
        db.execute("PRAGMA user_version = 7")
    for path, said in (
        (text, "cannot be opened"),
        (other, "another program's"),
        (later, "in form 7"),
        (tmp_path, "cannot be opened"),
        (tmp_path / "no" / "folder", "cannot be opened"),
    ):
        with pytest.raises(StartupError, match=said):
            opened(path)
    assert other.read_bytes()[:6] == b"SQLite"


def test_bytes_are_bounded() -> None:
    """Count streams, too, and what a response grows to."""
    bounds = {"max_bytes": 100_000}
    for store in (MemoryStore(None, options=Bounds(**bounds)), opened("", **bounds)):
        for number in range(10):
            store.add(response(str(number), ended=False))
        for number in range(10):
            store.append("", str(number), [b"x" * 10_000] * 2)
        there = [number for number in range(10) if store.get("", str(number)) is not None]
        assert there == [6, 7, 8, 9], type(store)
        assert store.update(response("6", response=b"x" * 50_000))
        assert store.get("", "6") is None
        assert store.get("", "7") is not None
        store.close()
