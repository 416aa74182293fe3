"""Runs of tokens (n-grams) on the host: texts that are kept up to date by what is new, and hashes of their runs.

Everything is done for all new tokens of all rows at once, so a step costs what is new in it, however long texts are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ferrule.errors import ConfigError
from ferrule.interfaces.speculator import KnownRows

LongArray = np.ndarray[Any, np.dtype[np.int64]]
IntArray = np.ndarray[Any, np.dtype[np.int32]]
HashArray = np.ndarray[Any, np.dtype[np.uint64]]

_HERE = torch.device("cpu")
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: multiplication spreads bits upwards
_FACTORS = _ODD ** np.arange(1, 65, dtype=np.uint64)


@dataclass(frozen=True)
class News:
    """The new tokens of a step's rows: `places` [new] in `Texts.cells` of the cells before them, row after row.

    A text's first token stands behind a 0. `ends` [rows] are the places of the last tokens, which nothing follows yet.
    """

    slots: LongArray  # [rows]
    ends: LongArray  # [rows]
    places: LongArray  # [new]
    owners: LongArray  # [new]: their slots


class Texts:
    """The known ids of each slot, plus 1, one behind the other in `cells`; 0 is no token.

    A slot's ids stand behind a 0, and what is not known behind them is 0, so that runs of tokens end there. `front`
    zeros come before all, `spare` cells behind.
    """

    def __init__(self, num_slots: int, front: int, spare: int = 0) -> None:
        self._num_slots, self._front, self._spare = num_slots, front, spare
        self.known: LongArray = np.zeros(num_slots, np.int64)  # ids of each slot that are in its cells
        self.row = 0  # cells of a slot
        self.cells: IntArray = np.zeros(0, np.int32)

    def fit(self, width: int) -> None:
        """Make room for texts of `width` ids. Memory that is never written is never taken."""
        if self.row != width + 1:
            self.row = width + 1
            self.cells = np.zeros(self._front + self._num_slots * self.row + self._spare, np.int32)
            self.known[:] = 0

    @property
    def spare(self) -> int:
        """The first of the spare cells."""
        return self._front + self._num_slots * self.row

    def origins(self, slots: LongArray) -> LongArray:
        """Return the places of the slots' first ids."""
        return self._front + slots * self.row + 1

    def slot_of(self, places: LongArray) -> LongArray:
        """Return the slots that places belong to; no slot, but the number of slots or more, for spare cells."""
        return (places - self._front) // self.row

    def forget(self, slot: int) -> None:
        """Clear the cells of a slot."""
        start = self._front + slot * self.row + 1
        self.cells[start : start + int(self.known[slot])] = 0
        self.known[slot] = 0

    def follow(self, rows: KnownRows) -> News:
        """Take in what is new in the rows. Waits for the device, if it is another one than the host."""
        history = rows.history
        self.fit(history.shape[1])
        slots, lengths = np.array(rows.slots), rows.lengths.cpu().numpy()
        owners, positions = _new(slots, self.known[slots], lengths)
        if history.device == _HERE:
            ids = history.numpy()[owners, positions]
        else:
            where = [torch.from_numpy(each).to(history.device) for each in (owners, positions)]
            ids = history[where[0], where[1]].cpu().numpy()
        places = self.origins(owners) + positions
        self.cells[places] = ids + 1
        self.known[slots] = lengths
        return News(slots, self.origins(slots) + lengths - 1, places - 1, owners)


def _new(slots: LongArray, known: LongArray, lengths: LongArray) -> tuple[LongArray, LongArray]:
    """Return the slots and the positions of all ids in [known, lengths), row after row."""
    counts = lengths - known
    if (counts == 1).all():
        return slots, known
    first = np.cumsum(counts) - counts
    return np.repeat(slots, counts), np.arange(counts.sum()) - np.repeat(first - known, counts)


def hashes(windows: HashArray, keys: HashArray, lengths: slice | Sequence[int], bits: int) -> LongArray:
    """Return hashes [rows, lengths] of `bits` bits of the last tokens in `windows` [rows, longest], newest first.

    `lengths` are one less than numbers of tokens. `keys` [rows] keep runs of different owners apart.
    """
    sums = np.cumsum(windows * _FACTORS[: windows.shape[1]], axis=1)[:, lengths]
    mixed = (sums ^ (sums >> np.uint64(29)) ^ keys[:, None]) * _ODD
    found: LongArray = (mixed >> np.uint64(64 - bits)).astype(np.int64)
    return found


def guesses_of(ids: LongArray, device: torch.device) -> torch.Tensor:
    """Bring guesses [rows, any number] to the device."""
    return torch.from_numpy(ids).to(device)


def number(settings: Mapping[str, Any], key: str, default: float, least: float, most: float) -> Any:
    """Return a number of --speculative-config, whole if its default is. Raises ConfigError for one out of range."""
    value = settings.get(key, default)
    kinds = (int,) if isinstance(default, int) else (int, float)
    if type(value) not in kinds or not least <= value <= most:
        noun = "a whole number" if isinstance(default, int) else "a number"
        raise ConfigError(
            f"--speculative-config.{key}: {value!r:.80} is not valid; expected {noun} from {least:g} to {most:g}."
        )
    return value
