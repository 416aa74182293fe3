"""`Board`: the few numbers that the processes of one server share, in memory that all of them map."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

from ferrule.slow_start import waiting

BEAT = 0  # monotonic seconds, one clock for the machine: when the process last showed that it is alive
STALLED = 1  # engine: seconds for which work has waited without a step's end
READY = 2  # API process: 1 once it could serve
WAITING = 3  # API process: choices that wait for their first token
WAITING_TOKENS = 4  # and the tokens of their prompts
LOAD = 5  # API process: requests with a body that it is serving
CHECKED = 6  # API process: 1 once everything that it needs before weights are loaded is open
ENGINE_NUMBER = 7  # engine's row, by the launcher: restarts before the engine that runs; -1: none runs or will
BUFFERED = 8  # API process: bytes that it keeps for its clients
STATE = 9  # API process: the index in STATES of its state
PROMPT_TOKENS = 10  # API process: prompt tokens of its choices with a first token
PROMPT_CACHED = 11  # and those of them that came from the prefix cache
GENERATION_TOKENS = 12  # API process: tokens that the engine generated for its choices
ADAPTER_CHANGES = 13  # API process: times that it has changed the table of adapters

STATES = ("starting", "ready", "draining", "dead")
_SILENCE = 10.0  # seconds without a heartbeat until a process counts as stalled

# Of each API key, for the process that writes them: see `ferrule.api_keys`.
MAX_CALLERS = 1024
OPEN = 0  # requests in progress
SPENT_IN = 1  # number of the minute
SPENT = 2  # and the tokens that were used in it

_FIRST_CALLER = 14
_PER_CALLER = 3
_CELLS = _FIRST_CALLER + _PER_CALLER * MAX_CALLERS
_BYTES = 8 * _CELLS
ENGINE = 0  # row of the engine; API process i has row i + 1
_POLL = 0.005  # seconds between two looks at a cell


def caller_cell(number: int, which: int) -> int:
    """Return the cell of a caller by its number, for OPEN, SPENT_IN or SPENT."""
    return _FIRST_CALLER + _PER_CALLER * number + which


class Board:
    """A table of numbers with a row for each process. A cell has one writer, its row's process; a reader sees whole
    values. After an engine has died, the launcher writes its row until the next one runs.

    `path` names the file, made by `Board.create`; without one the only row is this process's own, whatever it does.
    """

    def __init__(self, path: Path | None = None, row: int = ENGINE) -> None:
        self.folder = path and path.parent
        self.row = row
        self.watched = False  # the launcher reads what this process writes to the folder
        if path is None:
            memory = mmap.mmap(-1, _BYTES)
        else:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        self._cells = memoryview(memory).cast("d")
        self.rows = len(self._cells) // _CELLS

    @classmethod
    def create(cls, path: Path, num_api: int) -> Board:
        """Create the board's file, and open it for the launcher."""
        path.write_bytes(bytes(_BYTES * (1 + num_api)))
        return cls(path)

    def engine_ended(self) -> None:
        """Reset the engine's heartbeat, in the launcher: the next engine does not beat while it loads."""
        for cell in (BEAT, STALLED):
            self.put(cell, 0.0)

    @property
    def ready(self) -> bool:
        """Whether all API processes can serve. Every process gives the same answer, so that they are ready together."""
        return self.total(READY) >= self.rows - 1

    def wait_checked(self, stopping: threading.Event) -> bool:
        """Wait until every API process has set CHECKED, so that weights may be loaded. Returns False when `stopping`
        came first.
        """
        processes = max(self.rows - 1, 1)  # without a file, the engine's process has the API in it
        with waiting("the API processes, which open what they need"):
            while self.total(CHECKED) < processes:
                if stopping.wait(_POLL):
                    return False
        return True

    @property
    def shared(self) -> tuple[Path, int] | None:
        """The folder in which API processes read each other's files, and this process's number; None without one."""
        return (self.folder, self.row - 1) if self.folder and (self.watched or self.rows > 2) else None

    @property
    def leads(self) -> bool:
        """Whether this is the first API process, which reports for all where one has to."""
        return self.row <= 1

    def put(self, cell: int, value: float) -> None:
        self._cells[self.row * _CELLS + cell] = value

    def add(self, cell: int, value: float) -> None:
        self._cells[self.row * _CELLS + cell] += value

    def get(self, cell: int, row: int = ENGINE) -> float:
        return self._cells[row * _CELLS + cell]

    def silent(self, row: int, limit: float = _SILENCE) -> float:
        """Return the seconds since a process showed that it is alive; 0 within the limit, or before the first sign."""
        beat = self.get(BEAT, row)
        silent = time.monotonic() - beat if beat else 0.0
        return silent if silent > min(_SILENCE, limit) else 0.0

    def engine_stall(self, watchdog: float) -> str:
        """Return a sentence that says for how long the engine has made no progress; empty within the limits.

        A process that was stopped, or that holds the interpreter, is silent. A step that takes long is only slow.
        """
        waits = self.get(STALLED)
        seconds = max(self.silent(ENGINE, watchdog), waits if waits > watchdog / 2 else 0.0)
        return f"The engine has made no progress for {seconds:.0f} s." if seconds else ""

    def api_stall(self) -> str:
        """Return a sentence that says for how long another API process has shown no sign of life; empty within the
        limit.
        """
        seconds = max((self.silent(row) for row in range(1, self.rows) if row != self.row), default=0.0)
        return f"An API process has made no progress for {seconds:.0f} s." if seconds else ""

    def mine(self, cell: int) -> float:
        return self.get(cell, self.row)

    def total(self, cell: int) -> int:
        """Return the sum of a cell over all processes."""
        return int(sum(self._cells[cell::_CELLS]))
