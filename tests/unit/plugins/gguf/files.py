"""A small GGUF file, written here byte by byte so that any of them can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

_TYPES = {bool: 7, int: 4, float: 6, str: 8}
_FORMS = {bool: "B", int: "I", float: "f"}


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, value: Any) -> bytes:
    if isinstance(value, bytes):  # as it is, with its type
        return text(key) + value
    if isinstance(value, list):
        kind = type(value[0])
        items = b"".join(map(text, value)) if kind is str else struct.pack(f"<{len(value)}{_FORMS[kind]}", *value)
        return text(key) + struct.pack("<IIQ", 9, _TYPES[kind], len(value)) + items
    kind = type(value)
    stored = text(value) if kind is str else struct.pack(f"<{_FORMS[kind]}", value)
    return text(key) + struct.pack("<I", _TYPES[kind]) + stored


def tensor(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """Return the entry of a tensor. `shape` is as files have it: inputs first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(
    metadata: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: int = 0,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Return a file with `data` bytes of tensors."""
    num_tensors, num_entries = counts or (len(tensors), len(metadata))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join((*metadata, *tensors))
    return head + bytes(-len(head) % 32) + bytes(index % 251 for index in range(data))
