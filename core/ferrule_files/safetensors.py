"""Safetensors files: their headers, which are checked before anything is mapped, and their tensors.

Format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data, which
the ranges must cover without hole or overlap. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrule.errors import CheckpointError
from ferrule_files.shards import missing_file

if TYPE_CHECKING:
    import torch

_MAX_HEADER = 100 << 20
_METADATA = "__metadata__"  # a key of the header that does not name a tensor
_MAPPED_BYTES = 64 << 20
_MAX_DIMENSIONS = 64  # as torch has it
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64"), 64),
}


def read_tensors(file: Path, sizes: Mapping[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a file whose header is whole; `sizes` are bytes by the tensors' names.

    The file is mapped anew for every few tensors: pages that were read count as this process's as long as it is mapped.

    Those of a large tensor count least while little of the model has been written, so these come first.
    """
    from safetensors import SafetensorError, safe_open

    try:
        for names in _batches(large_first(sizes)):
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in names:
                    yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


def large_first(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the same tensors with those first that are larger than what is mapped at once, the largest first.

    The others keep their order.
    """
    return dict(sorted(sizes.items(), key=lambda item: -item[1] if item[1] > _MAPPED_BYTES else 0))


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the names in order, in batches that end when their bytes reach a bound."""
    batch: list[str] = []
    size = 0
    for name, num_bytes in sizes.items():
        batch.append(name)
        size += num_bytes
        if size >= _MAPPED_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def read_header(file: Path) -> dict[str, int]:
    """Return the bytes of each tensor by its name, in the order of the data.

    Raises CheckpointError that names the file and, where there is one, the tensor: for a header that is too large or
    not JSON, an unknown type, and ranges that overlap, leave holes, do not fit their shape, or end before or after the
    file does.
    """
    header, data = _tensors(file)
    return _check_ranges(file, header, data)


def shapes(file: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return each tensor's shape and bytes by name, in the data's order. Raises CheckpointError as `read_header`
    does.
    """
    header, data = _tensors(file)
    return {name: (tuple(header[name]["shape"]), size) for name, size in _check_ranges(file, header, data).items()}


def _tensors(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header's entry of each tensor, and the size of the data."""
    header, data = _read(file)
    header.pop(_METADATA, None)
    return header, data


def metadata(file: Path) -> dict[str, str]:
    """Return the texts that a file has about itself. Raises CheckpointError for a damaged header."""
    stated = _read(file)[0].get(_METADATA)
    return {key: value for key, value in stated.items() if isinstance(value, str)} if isinstance(stated, dict) else {}


def _read(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header, and the size of the data."""
    if not file.is_file():
        raise missing_file(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        return _header(file, size, stream.read)


def remote_shapes(file: Path, size: int, read: Callable[[int], bytes]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return the shape and bytes of each tensor as `shapes` does, for a file of `size` bytes elsewhere.

    `read` returns the file's next bytes; `file` is for messages.
    """
    header, data = _header(file, size, read)
    header.pop(_METADATA, None)
    return {name: (tuple(header[name]["shape"]), size) for name, size in _check_ranges(file, header, data).items()}


def _header(file: Path, size: int, read: Callable[[int], bytes]) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(read(8), "little")
    if size < 8 or length > min(_MAX_HEADER, size - 8):
        raise CheckpointError(
            f"{file} is not a safetensors file, or is truncated: {size} bytes, header length {length}."
        )
    return _parse(file, read(length)), size - 8 - length


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    def unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(members)
        if len(found) != len(members):
            raise ValueError("a name occurs twice")
        return found

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} has a damaged header: {error}.") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a damaged header: it is not a JSON object.")
    return header


def _check_ranges(file: Path, header: Mapping[str, Any], data: int) -> dict[str, int]:
    ranges = sorted((*_entry(file, name, entry), name) for name, entry in header.items())
    position = 0
    for start, stop, name in ranges:
        if start != position:
            what = "overlaps the one before it" if start < position else "leaves a hole before it"
            raise CheckpointError(f"{file}: the data of tensor {name!r} {what}.")
        position = stop
        if stop > data:
            raise CheckpointError(
                f"{file} is truncated: tensor {name!r} ends at byte {stop} of the data, and there are {data}."
            )
    if position != data:
        raise CheckpointError(f"{file} has {data - position} bytes that belong to no tensor.")
    return {name: stop - start for start, stop, name in ranges}


def _entry(file: Path, name: str, entry: Any) -> tuple[int, int]:
    """Return (start, stop) of a tensor's bytes. Raises CheckpointError for an entry that is not valid."""

    def whole(values: Any) -> bool:
        return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)

    if not isinstance(entry, dict) or not whole(entry.get("shape")) or not whole(entry.get("data_offsets")):
        raise CheckpointError(f"{file} has a damaged header: tensor {name!r} has no valid shape and data_offsets.")
    bits = _BITS.get(str(entry.get("dtype")))
    if bits is None:
        raise CheckpointError(f"{file}: tensor {name!r} has the unknown type {entry.get('dtype')!r}.")
    offsets = entry["data_offsets"]
    if len(entry["shape"]) > _MAX_DIMENSIONS or math.prod(max(1, size) for size in entry["shape"]) >= 1 << 60:
        raise CheckpointError(f"{file}: tensor {name!r} has a shape that no tensor can have.")
    if len(offsets) != 2 or (offsets[1] - offsets[0]) * 8 != math.prod(entry["shape"]) * bits:
        kind = f"shape {entry['shape']} and type {entry['dtype']}"
        raise CheckpointError(f"{file}: tensor {name!r} of {kind} does not fit its range {offsets}.")
    return offsets[0], offsets[1]
