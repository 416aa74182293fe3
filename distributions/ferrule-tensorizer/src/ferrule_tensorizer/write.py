"""Tensors to a tensorizer file, one after the other, with hashes, and encrypted where there is a key.

The layout is in `layout`. The library reads these files; hashes are of what is not encrypted yet, as it has them.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from ferrule_tensorizer import crypt
from ferrule_tensorizer.layout import CRC32, ENCRYPTED, HEADER, LONG, MAGIC, PLACES, SHA256, STATE, TYPES

_PLAIN, _ENCRYPTED = 2, 3  # versions
_STATED = {dtype: stated for stated, (dtype, _) in TYPES.items()}


def supported(tensor: torch.Tensor) -> bool:
    """Return whether the format has the tensor's type."""
    return str(tensor.dtype).removeprefix("torch.") in _STATED


def write(file: Path, tensors: Mapping[str, torch.Tensor], key: bytes | None = None) -> None:
    """Write one file of tensors that are `supported`. Raises OSError."""
    write_each(file, tensors.items(), tensors, key)


def write_each(
    file: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    forms: Mapping[str, torch.Tensor],
    key: bytes | None = None,
) -> None:
    """Write like `write`, one tensor after the other. `forms` are all of them, by name; they may be on the meta
    device.
    """
    length = sum(len(_entry(name, tensor, 0, 0)) for name, tensor in forms.items())
    flags = ENCRYPTED.to_bytes(32, "little") if key else bytes(32)
    version = _ENCRYPTED if key else _PLAIN
    index: list[bytes] = []
    with file.open("wb") as stream:
        stream.write(MAGIC + HEADER.pack(version, flags, 0, len(forms)) + length.to_bytes(8, "little"))
        begin = stream.tell()
        stream.write(bytes(length))
        for name, tensor in tensors:
            start = stream.tell()
            index.append(_entry(name, tensor, start, _append(stream, name, tensor, key)))
        total = stream.tell()
        stream.seek(len(MAGIC))
        stream.write(HEADER.pack(version, flags, total, len(index)))
        stream.seek(begin)
        stream.write(b"".join(index))


def _described(name: str, tensor: torch.Tensor) -> tuple[bytes, bytes, bytes]:
    """Name, kind, and type with shape, as index and header have them."""
    encoded, stated = name.encode(), _STATED[str(tensor.dtype).removeprefix("torch.")].encode()
    if max(tensor.shape, default=0) >= 1 << 32:
        raise ValueError(f"{name} has a dimension that needs version {LONG} of the format")
    shape = struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
    return len(encoded).to_bytes(2, "little") + encoded, bytes([STATE]), bytes([len(stated)]) + stated + shape


def _entry(name: str, tensor: torch.Tensor, header: int, data: int) -> bytes:
    named, kind, form = _described(name, tensor)
    return named + kind + form + PLACES.pack(header, data, tensor.nbytes)


def _append(stream: IO[bytes], name: str, tensor: torch.Tensor, key: bytes | None) -> int:
    """Write one tensor. Returns where its data begins."""
    named, kind, form = _described(name, tensor)
    raw: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    data = memoryview(raw)
    encryption: bytes = b""
    parts: Sequence[bytes | memoryview] = [data]
    if key:
        encryption, parts = crypt.encrypt(data, secrets.token_bytes(crypt.NONCE_BYTES), key)
        encryption = len(encryption).to_bytes(8, "little") + encryption
    kinds = ((SHA256, 32),) if key else ((CRC32, 4), (SHA256, 32))  # a short hash would tell of what is encrypted
    body = bytes(2) + kind + named + form
    size = tensor.nbytes.to_bytes(8, "little", signed=True)
    start = 8 + len(body)
    length = start + 3 + sum(2 + width for _, width in kinds) + len(encryption) + len(size)
    front = length.to_bytes(8, "little") + body
    hashed = front + _hashes({which: bytes(width) for which, width in kinds}) + size
    digest = hashlib.sha256(hashed)
    digest.update(data)
    hashes = {CRC32: zlib.crc32(data, zlib.crc32(hashed)).to_bytes(4, "little"), SHA256: digest.digest()}
    stream.write(front + _hashes({which: hashes[which] for which, _ in kinds}) + encryption + size)
    place = stream.tell()
    for part in parts:
        stream.write(part)
    return place


def _hashes(values: Mapping[int, bytes]) -> bytes:
    block = bytes([len(values)]) + b"".join(bytes([which, len(value)]) + value for which, value in values.items())
    return len(block).to_bytes(2, "little") + block
