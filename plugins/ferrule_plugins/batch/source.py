"""The input of a batch, read twice, line by line, so that its size does not matter.

The first pass counts, hashes, and notes eight bytes for each line; the second yields the rows. A line that has changed
since the first pass ends the run: results are kept by line.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from ferrule.errors import StartupError
from ferrule_plugins.batch.rows import Bad, Row, custom_id_of, duplicate, read_row, too_long

_PIECE = 1 << 20  # bytes of an overlong line that are read at a time
_ROOM = 64 << 10  # bytes that a line may have beside its body
_MARK = b"\xef\xbb\xbf"  # some editors put it before UTF-8
_BLANK = 0  # in place of a digest


@dataclass(frozen=True)
class Survey:
    """The findings of the first pass over the input. Line N is at index N - 1."""

    sha256: str
    rows: int  # lines that are not blank
    digests: array[int]  # 64 bits of each line, 0 for a blank one
    doubtful: frozenset[int]  # 64 bits of custom_ids that may occur more than once

    @property
    def lines(self) -> int:
        return len(self.digests)


@dataclass(frozen=True)
class _Line:
    number: int
    text: bytes | None  # None: too long
    digest: int


def survey(file: BinaryIO, max_body_bytes: int) -> Survey:
    """Read all of the file."""
    whole = hashlib.sha256()
    digests, ids = array("Q"), array("Q")
    rows = 0
    for line in _lines(file, max_body_bytes + _ROOM, whole):
        digests.append(line.digest)
        rows += line.digest != _BLANK
        custom_id = custom_id_of(line.text) if line.text else None
        if custom_id is not None:
            ids.append(_digest(custom_id.encode()))
    ordered = np.sort(np.frombuffer(ids, dtype=np.uint64)) if ids else np.empty(0, np.uint64)
    doubtful = frozenset(map(int, ordered[1:][ordered[1:] == ordered[:-1]]))
    return Survey(whole.hexdigest(), rows, digests, doubtful)


def read_rows(
    file: BinaryIO, seen: Survey, done: Container[int], urls: Collection[str], max_body_bytes: int
) -> Iterator[Row | Bad]:
    """Yield the rows whose line number is not in `done`, in the order of the file.

    Raises StartupError when the file changed.
    """
    first: dict[str, int] = {}  # the doubtful ones only
    count = 0
    for line in _lines(file, max_body_bytes + _ROOM, hashlib.sha256()):
        count = line.number
        if count > seen.lines or seen.digests[count - 1] != line.digest:
            raise _changed(count)
        if line.digest == _BLANK:
            continue
        finished = line.number in done
        if finished and not seen.doubtful:
            continue
        if line.text is None:
            row: Row | Bad = too_long(line.number, max_body_bytes + _ROOM)
        else:
            row = read_row(line.number, line.text, urls)
        custom_id = row.custom_id
        if custom_id is not None and _digest(custom_id.encode()) in seen.doubtful:
            earlier = first.setdefault(custom_id, line.number)
            row = row if earlier == line.number else duplicate(row, earlier)
        if not finished:
            yield row
    if count != seen.lines:
        raise _changed(count + 1)


def _changed(number: int) -> StartupError:
    return StartupError(
        f"Line {number} of the input has changed since the run began.",
        "Finished results are kept. Restore the former input to continue, or delete the journal to start again.",
    )


def _lines(file: BinaryIO, most: int, whole: Any) -> Iterator[_Line]:
    """Yield every line, with at most `most` bytes of it in memory. The hash `whole` is updated with every byte."""
    file.seek(0)
    number = 0
    while piece := file.readline(most + 1):
        number += 1
        whole.update(piece)
        if len(piece) <= most:
            text = (piece.removeprefix(_MARK) if number == 1 else piece).strip()
            yield _Line(number, text, _digest(text) if text else _BLANK)
            continue
        one = hashlib.blake2b(piece, digest_size=8)
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(_PIECE)
            whole.update(piece)
            one.update(piece)
        yield _Line(number, None, _number(one.digest()))


def _digest(data: bytes) -> int:
    return _number(hashlib.blake2b(data, digest_size=8).digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "big") or 1
