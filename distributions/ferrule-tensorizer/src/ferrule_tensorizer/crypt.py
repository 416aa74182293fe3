"""Encrypted tensors: libsodium's secretbox (XSalsa20-Poly1305), in chunks, with a key of 32 bytes.

What stands in front of a tensor, all numbers little-endian: u16 number of parts; for each: u64 bytes, u16 kind, and

    kind 2    u64 bytes of a chunk, 24 bytes of the first nonce, u64 number of chunks, a code (16 bytes) for each
    kind 3    a nonce and a code, for all of it
    kind 1    how the key was made from a password, which does not matter to one who has the key

The nonce of each chunk, read as a number, is one more than that of the chunk before.
https://github.com/coreweave/tensorizer/blob/main/tensorizer/_crypt_info.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ferrule.errors import CheckpointError, ConfigError
from ferrule_tensorizer.layout import Fields

KEY_BYTES, NONCE_BYTES, CODE_BYTES = 32, 24, 16
CHUNK_BYTES = 2 << 20  # of what is written
_CHUNKS, _WHOLE = 2, 3
_LEAST = 1024


@dataclass(frozen=True)
class Sealed:
    """The encryption of a tensor: chunks of `chunk` bytes, and the codes that belong to them."""

    chunk: int
    nonce: bytes
    codes: tuple[bytes, ...]

    def nonces(self) -> Iterator[bytes]:
        first = int.from_bytes(self.nonce, "little")
        for index in range(len(self.codes)):
            yield ((first + index) % (1 << NONCE_BYTES * 8)).to_bytes(NONCE_BYTES, "little")


def read_key(file: Path) -> bytes:
    """Return the key in a file, which has nothing else. Raises ConfigError, without what is in the file."""
    try:
        with file.open("rb") as stream:
            key = stream.read(KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"The key file {file} cannot be read: {error.strerror}.") from None
    if len(key) != KEY_BYTES:
        raise ConfigError(f"The key file {file} does not have {KEY_BYTES} bytes, which is what a key has.")
    return key


def parse(content: bytes, size: int) -> Sealed:
    """Parse how `size` bytes were encrypted. Raises ValueError."""
    fields = Fields(content)
    found: list[Sealed] = []
    for _ in range(fields.number(2)):
        part = Fields(fields.sized(8))
        kind = part.number(2)
        if kind == _CHUNKS:
            chunk, nonce, count = part.number(8), part.take(NONCE_BYTES), part.number(8)
            if chunk < _LEAST or count != -(-size // chunk):
                raise ValueError(f"it says that it was encrypted in {count} chunks of {chunk} bytes")
            found.append(Sealed(chunk, nonce, tuple(part.take(CODE_BYTES) for _ in range(count))))
        elif kind == _WHOLE:
            found.append(Sealed(max(1, size), part.take(NONCE_BYTES), (part.take(CODE_BYTES),)))
    if len(found) != 1:
        raise ValueError("it does not say how it was encrypted")
    return found[0]


def decrypt(data: memoryview, sealed: Sealed, key: bytes) -> None:
    """Decrypt in place. Raises CheckpointError for another key, or data that was changed."""
    from nacl.bindings import crypto_secretbox_open
    from nacl.exceptions import CryptoError

    start = 0
    for nonce, code in zip(sealed.nonces(), sealed.codes, strict=True):
        stop = min(start + sealed.chunk, len(data))
        try:
            data[start:stop] = crypto_secretbox_open(code + bytes(data[start:stop]), nonce, key)
        except CryptoError:
            raise CheckpointError("The key does not fit, or the data was changed.") from None
        start = stop


def encrypt(data: memoryview, nonce: bytes, key: bytes) -> tuple[bytes, list[bytes]]:
    """Return the encryption's header, which stands in front of the tensor, and the encrypted chunks. `nonce` is that of
    the first chunk.
    """
    from nacl.bindings import crypto_secretbox

    parts = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    nonces = Sealed(CHUNK_BYTES, nonce, (b"",) * len(parts)).nonces()
    boxes = [crypto_secretbox(bytes(part), each, key) for part, each in zip(parts, nonces, strict=True)]
    codes = b"".join(box[:CODE_BYTES] for box in boxes)
    body = _CHUNKS.to_bytes(2, "little") + CHUNK_BYTES.to_bytes(8, "little") + nonce
    body += len(parts).to_bytes(8, "little") + codes
    return (1).to_bytes(2, "little") + len(body).to_bytes(8, "little") + body, [box[CODE_BYTES:] for box in boxes]
