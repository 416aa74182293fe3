"""The header of a GGUF file, versions 2 and 3, read strictly: nothing is allocated by what the file claims.

Layout, little-endian: magic, version, number of tensors and of metadata entries; the metadata; the tensors' names,
shapes, types and offsets; padding to `general.alignment`; the data.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER = 256 << 20  # bytes; real ones have tens of megabytes, nearly all of it the vocabulary
_MAX_ENTRIES = 1 << 16  # of metadata, and of tensors
_MAX_LENGTH = 1 << 22  # of an array
_MAX_TEXT = 16 << 20  # bytes of a string
_MAX_NAME = 512  # bytes of a key or of a tensor's name
_MAX_SHARDS = 1 << 12
_ALIGNMENT = 32  # where the file does not state one
_STRING, _ARRAY, _BOOL = 8, 9, 7
_LENGTH = struct.Struct("<Q")  # of a string
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class BlockType:
    """A way to store numbers: `size` of them in `num_bytes`."""

    name: str
    size: int
    num_bytes: int


# By ggml's number. Those of which nothing but the name is known here are refused by it.
TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
FLOATS = ("F32", "F16", "BF16")
_OTHERS = ("*mmproj*.gguf", "imatrix*.gguf", "*imatrix.gguf")  # encoders of images; what a quantizer measured
_NAMES_ONLY = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor: `shape` has the outputs first, as torch has it; its bytes begin at `start` of `file`."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    file: Path
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.type.size * self.type.num_bytes

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.size * self.type.num_bytes


@dataclass(frozen=True)
class GgufModel:
    """The metadata of the first file, and the tensors of all files by name, in the order of their data."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def file(self) -> Path:
        return self.files[0]

    @cached_property
    def architecture(self) -> str:
        """Raises CheckpointError where it is not stated."""
        found: str = self.need("general.architecture", str)
        return found

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a value of the metadata, or `default`. Raises CheckpointError for a value of another type."""
        value = self.metadata.get(key)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise CheckpointError(f"{self.file}: {key!r} has a {type(value).__name__}, which is not what it should be.")
        return value

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return a value of the metadata. Raises CheckpointError for one that is missing or of another type."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.file} has no {key!r}, which is needed.")
        return value

    def own(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the value of a key that begins with the architecture's name, as `get` does."""
        return self.get(f"{self.architecture}.{key}", kind, default)


def find_files(place: Path, ignore: Sequence[str] = ()) -> list[Path]:
    """Return the files of the model that `place` holds: a file, one shard of several, or a folder with one model.

    A folder without a model has none. Raises CheckpointError for a folder with several models, and for a shard whose
    fellows are missing.
    """
    if not place.is_dir():
        return _shards(place)
    files = [
        file for file in sorted(place.glob("*.gguf")) if not any(file.match(pattern) for pattern in (*_OTHERS, *ignore))
    ]
    models = [file for file in files if (found := _SHARD.fullmatch(file.name)) is None or int(found[2]) == 1]
    if len(models) > 1:
        names = ", ".join(file.name for file in models[:8])
        raise CheckpointError(f"{place} has several models in GGUF: {names}.", "Name one of the files.")
    return _shards((models or files)[0]) if files else []


def _shards(file: Path) -> list[Path]:
    found = _SHARD.fullmatch(file.name)
    if found is None:
        return [file]
    count = int(found[3])
    if not 0 < int(found[2]) <= count <= _MAX_SHARDS:
        raise CheckpointError(f"{file} is not one of a series of files: its number is {found[2]} of {found[3]}.")
    files = [file.with_name(f"{found[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [each.name for each in files if not each.is_file()]
    if missing:
        raise CheckpointError(f"{file} is one of {count} files, of which {missing[0]} is missing.")
    return files


def read_model(files: Sequence[Path]) -> GgufModel:
    """Read the headers of the files of one model. Raises CheckpointError, which names the file and what is wrong."""
    headers = [read_header(file) for file in files]
    metadata = headers[0][0]
    tensors: dict[str, TensorInfo] = {}
    for file, (own, infos) in zip(files, headers, strict=True):
        if len(files) > 1 and own.get("split.count") != len(files):
            raise CheckpointError(f"{file} says that it is one of {own.get('split.count')!r} files, not {len(files)}.")
        for info in infos:
            if info.name in tensors:
                raise CheckpointError(f"{file}: the tensor {info.name!r} is there twice.")
            tensors[info.name] = info
    if len(files) == 1 and (metadata.get("split.count") or 0) not in (0, 1):
        count = metadata["split.count"]
        raise CheckpointError(f"{files[0]} is one of {count} files, and its name does not say where the others are.")
    return GgufModel(tuple(files), metadata, tensors)


def read_header(file: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    """Metadata and tensors of one file, those in the order of their data. Raises CheckpointError."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(file, data).read()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError:  # of mmap: an empty file
        raise CheckpointError(f"{file} is empty.") from None


class _Reader:
    """A position in a mapped file; whatever is read is checked against the file's end first."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file = file
        self._data = data
        self._end = min(len(data), _MAX_HEADER)
        self._at = 0

    def read(self) -> tuple[dict[str, Any], list[TensorInfo]]:
        if self._data[:4] != _MAGIC:
            raise CheckpointError(f"{self._file} is not a GGUF file.")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            what = "is big-endian" if swapped else f"has version {version}"
            raise CheckpointError(f"{self._file} {what}; little-endian GGUF files of versions 2 and 3 are read.")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        for count, what, least in ((num_tensors, "tensors", 24), (num_entries, "metadata entries", 13)):
            if count > min(_MAX_ENTRIES, (self._end - self._at) // least):
                raise self._damaged(f"{count} {what} do not fit into it")
        metadata = self._metadata(num_entries)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment > 1 << 20 or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {alignment!r}")
        infos = [self._tensor() for _ in range(num_tensors)]
        if len({name for name, *_ in infos}) < len(infos):
            raise self._damaged("a tensor is there twice")
        start = -(-self._at // alignment) * alignment
        return metadata, self._placed(infos, start, alignment)

    def _placed(
        self, infos: Sequence[tuple[str, tuple[int, ...], BlockType, int]], start: int, alignment: int
    ) -> list[TensorInfo]:
        """Return the tensors in the order of their data. Raises CheckpointError for data that is misplaced."""
        placed, border = [], 0
        for name, shape, kind, offset in sorted(infos, key=lambda info: info[3]):
            info = TensorInfo(name, shape, kind, self._file, start + offset)
            if offset % alignment:
                raise self._damaged(f"the data of {name!r} begins at {offset}, which is not a multiple of {alignment}")
            if offset < border:
                raise self._damaged(f"the data of {name!r} overlaps that of another tensor")
            border = offset + info.num_bytes
            if start + border > len(self._data):
                raise self._damaged(f"the data of {name!r} ends behind the end of the file; it may be truncated")
            placed.append(info)
        return placed

    def _metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self._text(_MAX_NAME)
            if key in found:
                raise self._damaged(f"the metadata {key!r} is there twice")
            found[key] = self._value(self._number("I"), key)
        return found

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(_MAX_TEXT)
        if kind in _NUMBERS:
            return self._numbers(kind, 1, key)[0]
        if kind != _ARRAY:
            raise self._damaged(f"the metadata {key!r} is of the unknown type {kind}")
        inner, length = self._number("I"), self._number("Q")
        if length > _MAX_LENGTH:
            raise self._damaged(f"the array {key!r} has {length} values")
        if inner == _STRING:
            if length * 8 > self._end - self._at:
                raise self._damaged(f"the array {key!r} ends behind it")
            return self._texts(length)
        if inner in _NUMBERS:
            return self._numbers(inner, length, key)
        raise self._damaged(
            f"the array {key!r} is of " + ("arrays" if inner == _ARRAY else f"the unknown type {inner}")
        )

    def _numbers(self, kind: int, count: int, key: str) -> list[Any]:
        form = f"<{count}{_NUMBERS[kind]}"
        values = struct.unpack_from(form, self._data, self._advance(struct.calcsize(form)))
        if kind != _BOOL:
            return list(values)
        if any(value > 1 for value in values):
            raise self._damaged(f"{key!r} has a truth value that is neither 0 nor 1")
        return [bool(value) for value in values]

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name, rank = self._text(_MAX_NAME), self._number("I")
        if not 1 <= rank <= 4:
            raise self._damaged(f"the tensor {name!r} has {rank} dimensions")
        shape = tuple(self._number("Q") for _ in range(rank))
        number, offset = self._number("I"), self._number("Q")
        kind = TYPES.get(number)
        if kind is None:
            known = _NAMES_ONLY.get(number, f"{number}, which is unknown")
            raise CheckpointError(
                f"{self._file}: the tensor {name!r} is of the type {known}; types that are read are "
                f"{', '.join(sorted(each.name for each in TYPES.values()))}."
            )
        if not all(0 < size < 1 << 40 for size in shape) or prod(shape) > len(self._data) * 8:
            raise self._damaged(f"the tensor {name!r} has the shape {list(shape)}, which does not fit into it")
        if shape[0] % kind.size:
            raise self._damaged(f"the rows of {name!r} have {shape[0]} numbers, not a multiple of {kind.size}")
        return name, shape[::-1], kind, offset

    def _text(self, most: int) -> str:
        length = self._number("Q")
        if length > most:
            raise self._damaged(f"a string has {length} bytes")
        at = self._advance(length)
        return self._data[at : at + length].decode(errors="replace")

    def _texts(self, count: int) -> list[str]:
        """Read `count` strings as `_text` does, fast, because a vocabulary has hundreds of thousands."""
        found, data, at, end, length_at = [], self._data, self._at, self._end, _LENGTH.unpack_from
        for _ in range(count):
            start = at + _LENGTH.size
            if start > end:
                raise self._damaged("its header ends behind it")
            (length,) = length_at(data, at)
            at = start + length
            if length > _MAX_TEXT or at > end:
                raise self._damaged(f"a string has {length} bytes")
            found.append(str(data[start:at], "utf-8", "replace"))
        self._at = at
        return found

    def _number(self, form: str) -> int:
        size = struct.calcsize(form)
        found: int = struct.unpack_from(f"<{form}", self._data, self._advance(size))[0]
        return found

    def _advance(self, size: int) -> int:
        """Return where the next `size` bytes begin, and move behind them. Raises CheckpointError at the header's
        end.
        """
        at = self._at
        if size > self._end - at:
            raise self._damaged("its header ends behind it")
        self._at = at + size
        return at

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file} is damaged: {what}.")
