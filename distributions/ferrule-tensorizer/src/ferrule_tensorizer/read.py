"""The tensors of a tensorizer file, one after the other: no more than one is in memory here."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ferrule.errors import CheckpointError
from ferrule_tensorizer import crypt
from ferrule_tensorizer.layout import Entry, read_index, tensor_header

if TYPE_CHECKING:
    import torch

_READ_BYTES = 8 << 20  # of one thread at a time


@dataclass(frozen=True)
class Reading:
    """The settings of reading a file: `readers` threads, hashes compared or not, the key of an encrypted one, and which
    tensors.
    """

    readers: int = 1
    verify: bool = False
    key: bytes | None = None
    wanted: Container[Entry] | None = None  # None: all


def read_tensors(file: Path, how: Reading) -> Iterator[tuple[Entry, torch.Tensor]]:
    """Yield every tensor, in the order of the file. Raises CheckpointError that names the file and the tensor."""
    index = read_index(file)
    if index.encrypted and how.key is None:
        keyfile = '--model-loader-extra-config \'{"encryption_keyfile": "FILE"}\' names the file with its key.'
        raise CheckpointError(f"{file} is encrypted.", keyfile)
    if how.key is not None and not index.encrypted:
        raise CheckpointError(f"{file} is not encrypted, and a key was given.", "Leave out 'encryption_keyfile'.")
    with file.open("rb") as stream, ThreadPoolExecutor(how.readers) as pool:
        for entry in index.entries:
            if how.wanted is not None and entry not in how.wanted:
                continue
            try:
                yield entry, _read(stream.fileno(), entry, how, pool)
            except ValueError as error:
                raise CheckpointError(f"{file}: tensor {entry.name!r} is damaged: {error}.") from None
            except OSError as error:
                raise CheckpointError(f"{file}: tensor {entry.name!r} cannot be read: {error.strerror}.") from None
            except CheckpointError as error:
                raise CheckpointError(f"{file}: tensor {entry.name!r} cannot be read: {error.message}") from None


def _read(descriptor: int, entry: Entry, how: Reading, pool: ThreadPoolExecutor) -> torch.Tensor:
    import torch

    content = bytearray(entry.data - entry.header)
    _fill(descriptor, memoryview(content), entry.header)
    header = tensor_header(bytes(content), entry, encrypted=how.key is not None)
    raw = torch.empty(entry.size, dtype=torch.uint8)
    view = memoryview(cast("Any", raw.numpy()))
    starts = range(0, entry.size, _READ_BYTES)
    for _ in pool.map(lambda at: _fill(descriptor, view[at : at + _READ_BYTES], entry.data + at), starts):
        pass
    if how.key is not None and entry.size:
        crypt.decrypt(view, crypt.parse(header.encryption, entry.size), how.key)
    wrong = header.wrong_hash(view) if how.verify else None
    if wrong is not None:
        raise ValueError(f"its {wrong} is not the one that the file states")
    dtype = getattr(torch, entry.dtype)
    return raw.view(dtype).view(entry.shape) if entry.size else torch.empty(entry.shape, dtype=dtype)


def _fill(descriptor: int, view: memoryview, position: int) -> None:
    """Read until the view is full. Raises ValueError where the file ends before."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], position + done)
        if count == 0:
            raise ValueError("the file ends within it")
        done += count
