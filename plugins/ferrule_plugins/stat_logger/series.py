"""Where figures are kept: arrays of floats that cost little to write, and that the processes of one server can add up.

A `Store` is a piece of memory that only its process writes. As a file in a folder that the API processes share, the
others can read it at any time: nobody is asked, so a process that hangs holds up no scrape, and what it counted stays.

The process that is scraped adds all files up, always in the same order, so that rounding never makes a sum decrease.
Labels have a fixed set of values, so a file's size is known beforehand. The first process alone records the engine's
figures, so that they are counted once.
"""

from __future__ import annotations

import contextlib
import mmap
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

_BYTES = 8 << 20  # of address space: a page takes memory once it is written to
_WORD = 8
_PREFIX = "figures-"

Key = tuple[str, ...]  # a metric's name, and the values of its labels


class Store:
    """A store of series in words of eight bytes: how many are used, then records. A record never moves, so a reader may
    keep its place.

    A record is the length of its key in bytes, the number of its values, the key, padded, and the values as floats.
    """

    def __init__(self, path: Path | None = None, read_only: bool = False) -> None:
        """Open the store in a file, or in memory without one. Raises OSError or ValueError for a file that does not
        exist yet.
        """
        if path is None:
            memory = mmap.mmap(-1, _BYTES)
        elif read_only:
            with path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        else:
            draft = path.with_name(f".{path.name}")
            with draft.open("w+b") as file:
                file.truncate(_BYTES)
                memory = mmap.mmap(file.fileno(), 0)
            draft.rename(path)
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        self._values = self._bytes.cast("d")
        self._records: dict[Key, memoryview[float]] = {}
        self._read = 1  # words whose records are known

    def cells(self, key: Key, width: int) -> memoryview[float]:
        """Return the values of a series, zeros at first. Values beyond the store's room are not kept."""
        found = self._records.get(key)
        return self._append(key, width) if found is None else found

    def _append(self, key: Key, width: int) -> memoryview[float]:
        name = "\0".join(key).encode()
        start = max(1, self._words[0])
        values = start + 2 + -(-len(name) // _WORD)
        if values + width > len(self._words):
            return memoryview(bytearray(width * _WORD)).cast("d")
        self._words[start], self._words[start + 1] = len(name), width
        self._bytes[(start + 2) * _WORD : (start + 2) * _WORD + len(name)] = name
        self._records[key] = self._values[values : values + width]
        self._words[0] = self._read = values + width  # last: now it is there for others
        return self._records[key]

    def records(self) -> dict[Key, memoryview[float]]:
        """Return all series, in the order in which they were made."""
        while self._read < self._words[0]:
            length, width = self._words[self._read], self._words[self._read + 1]
            begin = (self._read + 2) * _WORD
            values = self._read + 2 + -(-length // _WORD)
            key = tuple(bytes(self._bytes[begin : begin + length]).decode().split("\0"))
            self._records[key] = self._values[values : values + width]
            self._read = values + width
        return self._records


class Stores:
    """The store of this process, and those of its siblings to add up."""

    def __init__(self, folder: Path | None = None, number: int | None = 0) -> None:
        """Open this process's store. Without a number, this process only reads: its own store is not one of them."""
        self.folder = folder
        self.own = Store(None if folder is None or number is None else folder / f"{_PREFIX}{number}")
        self._known = {} if number is None else {str(number): self.own}

    def by_process(self) -> list[tuple[str, Store]]:
        """Return each store with the process's number, in one order for all: sums must be the same to the last bit, or
        a counter could seem to fall.
        """
        for path in self.folder.glob(f"{_PREFIX}*") if self.folder else ():
            number = path.name.removeprefix(_PREFIX)
            if number not in self._known:
                with contextlib.suppress(OSError, ValueError):
                    self._known[number] = Store(path, read_only=True)
        return sorted(self._known.items())

    def totals(self) -> dict[Key, list[float]]:
        """Return every series, summed."""
        found: dict[Key, list[float]] = {}
        for _, store in self.by_process():
            for key, cells in store.records().items():
                values: list[float] = list(cells)
                before = found.get(key)
                found[key] = values if before is None else [a + b for a, b in zip(before, values, strict=True)]
        return found


class Histogram:
    """A writer of a histogram's cells: a count for each bucket, the last without a bound, and the sum."""

    def __init__(self, cells: memoryview[float], bounds: Sequence[float]) -> None:
        self._cells = cells
        self._bounds = tuple(bounds)

    def observe(self, value: float, times: int = 1) -> None:
        self._cells[bisect_left(self._bounds, value)] += times
        self._cells[-1] += value * times


def write_text(cells: memoryview[float], text: str) -> None:
    """Write a text into cells, one for each character, and cut it where they end. The first one is its length."""
    text = text[: len(cells) - 1]
    cells[: len(text) + 1] = array("d", (len(text), *map(ord, text)))


def read_text(values: Sequence[float]) -> str:
    return "".join(chr(int(value)) for value in values[1 : int(values[0]) + 1])


def one_two_five(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 … up to `most`."""
    bounds: list[float] = []
    scale = 1
    while scale <= most:
        bounds += [step * scale for step in (1, 2, 5) if step * scale <= most]
        scale *= 10
    return tuple(bounds)
