"""The table of served adapters, of which the API processes of a server have one together.

With one process the table is in its memory. Several share a file in the board's folder: whoever changes it holds a
lock, replaces the file, and counts the change in its own cell of the board. A process reads the file again when the sum
of these cells has changed, so looking up a name costs no system call. The table outlives an engine: its adapters are
loaded into the next one when requests name them.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec
from msgspec import Struct

from ferrule.config import PromptAdapter
from ferrule.shared_memory.board import ADAPTER_CHANGES, Board
from ferrule.types import Adapter, AdapterInfo

_LOCK_POLL = 0.005  # seconds


class Served(Struct, frozen=True, kw_only=True):
    """An adapter of weights, or a prompt adapter, under the name that clients use. `parent` is the name of its base
    model.
    """

    name: str
    parent: str
    adapter: Adapter | None = None
    prompt: PromptAdapter | None = None
    info: AdapterInfo = AdapterInfo()  # of `adapter`

    @property
    def path(self) -> str:
        """The folder of either."""
        return "".join(one.path for one in (self.adapter, self.prompt) if one is not None)


_Entries = Mapping[str, Served]


class AdapterTable:
    """Adapters by their names, in the order in which they were added. Owned by one event loop."""

    def __init__(self, board: Board, entries: Iterable[Served] = ()) -> None:
        self._board = board
        self._entries: _Entries = MappingProxyType({entry.name: entry for entry in entries})
        self._seen = 0  # changes that this process knows
        folder = board.folder if board.rows > 2 else None
        self._file = None if folder is None else Path(folder, "adapters")
        self._changing = asyncio.Lock()

    def entries(self) -> _Entries:
        changes = self._board.total(ADAPTER_CHANGES)
        if changes != self._seen and self._file is not None:
            found = msgspec.msgpack.decode(self._file.read_bytes(), type=list[Served])
            self._entries = MappingProxyType({entry.name: entry for entry in found})
            self._seen = changes
        return self._entries

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[_Entries]:
        """Lock the table against changes by others, and yield its entries; the caller may `replace` them."""
        async with self._changing:
            if self._file is None:
                yield self.entries()
                return
            lock = os.open(self._file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while not _locked(lock):
                    await asyncio.sleep(_LOCK_POLL)
                yield self.entries()
            finally:
                os.close(lock)

    def replace(self, entries: Iterable[Served]) -> None:
        """Replace all entries. Only for a caller within `changing`."""
        found = {entry.name: entry for entry in entries}
        if self._file is not None:
            fresh = self._file.with_suffix(".new")
            fresh.write_bytes(msgspec.msgpack.encode(list(found.values())))
            fresh.replace(self._file)
        self._entries = MappingProxyType(found)
        self._board.add(ADAPTER_CHANGES, 1)
        self._seen = self._board.total(ADAPTER_CHANGES)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
