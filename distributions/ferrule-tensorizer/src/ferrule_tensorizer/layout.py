"""The layout of a tensorizer file: its header, its index, and the header in front of each tensor.

All numbers are little-endian:

    "|TZR|", u32 version, 32 bytes of flags, u64 size, 8 unused bytes, u64 number of tensors
    u64 bytes of the index; for each tensor: [u32 version,] name, u8 kind, type, shape,
        u64 where its header begins, u64 where its data begins, u64 bytes of its data
    for each tensor: u64 bytes of the header, u16 module, u8 kind, name, type, shape, hashes, [encryption,]
        i64 bytes of its data, and the data

A name has its length in front as u16, a type as u8, a shape as u8 (numbers of u32, or of u64 in version 5), hashes as
u16, the encryption as u64. https://github.com/coreweave/tensorizer/blob/main/tensorizer/serialization.py

The library that wrote the file allocates what a header says before it knows whether the file has it, takes data that is
cut short as whole, and keeps every tensor that it gives out, so that a model would be in memory twice. Therefore files
are read here: each number is compared with the size of the file before it is used, and each header with the index.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ferrule.errors import CheckpointError

MAGIC = b"|TZR|"
HEADER = struct.Struct("<I32sQ8xQ")
PLACES = struct.Struct("<QQQ")
PARAMETER, BUFFER, STATE = range(3)  # the kinds of tensors
ENCRYPTED, VERSIONED = 1, 2  # flags
CRC32, SHA256 = 0, 1  # the kinds of hashes
LONG = 5  # the version in which a shape may have numbers of 64 bits
# What numpy and torch call the types: torch's name is behind a zero where numpy has none.
TYPES: Mapping[str, tuple[str, int]] = {  # → torch's name, bytes
    **{f"<f{size}": (f"float{size * 8}", size) for size in (2, 4, 8)},
    **{f"<{kind[0]}{size}": (f"{kind}{size * 8}", size) for kind in ("int", "uint") for size in (2, 4, 8)},
    "|i1": ("int8", 1),
    "|u1": ("uint8", 1),
    "|b1": ("bool", 1),
    "<V2\0torch.bfloat16": ("bfloat16", 2),
    **{
        f"|V1\0torch.{name}": (name, 1)
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    },
}
_VERSIONS = range(1, 6)
_FLAGGED = 4  # the version from which there are flags
_ALWAYS_ENCRYPTED = 3
_MAX_INDEX = 100 << 20
_MAX_HEADER = 64 << 20  # it has 16 bytes for each 2 MiB of an encrypted tensor
_MAX_DIMENSIONS = 64  # as torch has it


@dataclass(frozen=True)
class Entry:
    """One tensor. `header` and `data` are where these begin in the file, `size` the bytes of the data."""

    name: str
    kind: int
    dtype: str  # as torch calls it, without "torch."
    shape: tuple[int, ...]
    header: int
    data: int
    size: int
    long: bool = False


@dataclass(frozen=True)
class Index:
    entries: tuple[Entry, ...]  # in the order of the data
    encrypted: bool


@dataclass(frozen=True)
class TensorHeader:
    """The header in front of one tensor. `hashed` is the part of the header that hashes are made of, with zeros for the
    hashes.
    """

    hashes: tuple[tuple[int, bytes], ...]
    hashed: bytes
    encryption: bytes

    def wrong_hash(self, data: memoryview) -> str | None:
        """Return the name of a hash that the data does not have, or None. Raises ValueError where no hash is known."""
        known = {CRC32: "CRC32", SHA256: "SHA256"}
        if not any(kind in known for kind, _ in self.hashes):
            raise ValueError("it has no hash to verify")
        for kind, said in self.hashes:
            if kind == CRC32 and zlib.crc32(data, zlib.crc32(self.hashed)).to_bytes(4, "little") != said:
                return known[kind]
            if kind == SHA256:
                digest = hashlib.sha256(self.hashed)
                digest.update(data)
                if digest.digest() != said:
                    return known[kind]
        return None


class Fields:
    """A reader of one value after the other of bytes that may end too early, which is a ValueError."""

    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0

    def take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self.content):
            raise ValueError("it ends too early")
        return self.content[start : self.position]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def sized(self, size: int) -> bytes:
        """Return bytes whose length stands in front of them, in `size` bytes."""
        return self.take(self.number(size))

    def shape(self, long: bool) -> tuple[int, ...]:
        size = 8 if long else 4
        count = self.number(1)
        if count > _MAX_DIMENSIONS:
            raise ValueError(f"a shape has {count} dimensions")
        return tuple(self.number(size) for _ in range(count))


def read_index(file: Path) -> Index:
    """Read which tensors a file has, without their data. Raises CheckpointError that names the file and what is
    wrong.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            return _index(stream, size)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged, or not a tensorizer file: {error}.") from None


def _index(stream: IO[bytes], size: int) -> Index:
    start = stream.read(len(MAGIC) + HEADER.size)
    if len(start) < len(MAGIC) + HEADER.size or not start.startswith(MAGIC):
        raise ValueError(f"its first bytes are not those of one ({size} bytes)")
    version, flag_bytes, _, count = HEADER.unpack_from(start, len(MAGIC))
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, and versions 1 to {_VERSIONS[-1]} are known")
    flags = int.from_bytes(flag_bytes, "little") if version >= _FLAGGED else 0
    if flags & ~(ENCRYPTED | VERSIONED):
        raise ValueError(f"it has the unknown flags {flags:#x}")
    if flags & VERSIONED and version < LONG:
        raise ValueError(f"its flags do not belong to version {version}")
    length = int.from_bytes(stream.read(8), "little")
    end = len(start) + 8 + length
    if length > _MAX_INDEX or end > size:
        raise ValueError(f"its index has {length} bytes, and the file {size}")
    fields = Fields(stream.read(length))
    if len(fields.content) != length or not 0 < count <= length:
        raise ValueError(f"it has {count} tensors and an index of {length} bytes")
    entries = [_entry(fields, versioned=bool(flags & VERSIONED)) for _ in range(count)]
    return Index(_checked(entries, end, size), bool(flags & ENCRYPTED) or version == _ALWAYS_ENCRYPTED)


def _entry(fields: Fields, versioned: bool) -> Entry:
    version = fields.number(4) if versioned else 1
    if version not in (1, LONG):
        raise ValueError(f"a tensor has the unknown version {version}")
    name = _name(fields.sized(2))
    kind, stated = fields.number(1), fields.sized(1).decode(errors="backslashreplace")
    shape = fields.shape(version == LONG)
    header, data, size = PLACES.unpack(fields.take(PLACES.size))
    if kind not in (PARAMETER, BUFFER, STATE):
        raise ValueError(f"tensor {name!r} is of the unknown kind {kind}")
    if stated not in TYPES:
        raise ValueError(f"tensor {name!r} has the unknown type {stated!r}")
    dtype, width = TYPES[stated]
    if math.prod(max(1, each) for each in shape) >= 1 << 60:
        raise ValueError(f"tensor {name!r} has a shape that no tensor can have")
    if math.prod(shape) * width != size:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} and type {dtype} does not have {size} bytes")
    return Entry(name, kind, dtype, shape, header, data, size, version == LONG)


def _name(raw: bytes) -> str:
    if raw[:1] == b"\x1e":
        raise ValueError("its tensors are in dictionaries or lists within others, which are not a model's")
    name = raw.decode("utf-8")
    if not name or not name.isprintable():
        raise ValueError(f"a tensor has the name {name!r}")
    return name


def _checked(entries: list[Entry], start: int, size: int) -> tuple[Entry, ...]:
    """Return the entries in the order of their places, which are within [start, size) and do not overlap. Raises
    ValueError.
    """
    names: set[str] = set()
    ordered = sorted(entries, key=lambda entry: (entry.header, entry.data))
    for entry in ordered:
        if entry.name in names:
            raise ValueError(f"tensor {entry.name!r} occurs twice")
        names.add(entry.name)
        if not start <= entry.header < entry.data <= entry.header + _MAX_HEADER:
            raise ValueError(f"tensor {entry.name!r} begins where the one before it or the index is")
        start = entry.data + entry.size
        if start > size:
            raise ValueError(f"it is truncated: tensor {entry.name!r} ends at byte {start}, and there are {size}")
    return tuple(ordered)


def tensor_header(content: bytes, entry: Entry, encrypted: bool) -> TensorHeader:
    """Parse `content`, all bytes between the entry's header and data. Raises ValueError where it contradicts the
    index.
    """
    fields = Fields(content)
    length, _, kind = fields.number(8), fields.number(2), fields.number(1)
    name, stated = fields.sized(2).decode("utf-8", "backslashreplace"), fields.sized(1).decode("utf-8", "replace")
    shape = fields.shape(entry.long)
    dtype, _ = TYPES.get(stated, ("", 0))
    if (length, name, kind, dtype, shape) != (len(content), entry.name, entry.kind, entry.dtype, entry.shape):
        raise ValueError("what stands in front of its data belongs to another tensor")
    place = fields.position + 2
    block = fields.sized(2)
    hashes = tuple(_hashes(block))
    before = content[:place] + _zeroed(block) if block else content[:place]
    encryption = fields.sized(8) if encrypted else b""
    rest = content[fields.position :]
    if len(rest) != 8 or int.from_bytes(rest, "little", signed=True) != entry.size:
        raise ValueError("what stands in front of its data states another size")
    return TensorHeader(hashes, before + rest, encryption)


def _hashes(block: bytes) -> Iterator[tuple[int, bytes]]:
    fields = Fields(block)
    for _ in range(fields.number(1) if block else 0):
        yield fields.number(1), fields.sized(1)


def _zeroed(block: bytes) -> bytes:
    fields, zeroed = Fields(block), bytearray(block)
    for _ in range(fields.number(1)):
        fields.take(1)
        size = len(fields.sized(1))
        zeroed[fields.position - size : fields.position] = bytes(size)
    return bytes(zeroed)
