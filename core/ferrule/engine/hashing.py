"""Digests of full blocks. Each covers all that its content depends on: every token before it, adapter, media, salt.

The first digest's root is random, and drawn by whoever starts engines: those with the same root have the same digests
for the same blocks, so they can be compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256

from ferrule.types import MediaItem

Hasher = Callable[[bytes, Sequence[int]], bytes]


def _sha256() -> Hasher:
    return lambda parent, tokens: sha256(_packed(parent, tokens)).digest()


def _sha256_cbor() -> Hasher:
    written = _cbor()
    return lambda parent, tokens: sha256(written(parent, tokens)).digest()


def _xxhash() -> Hasher:
    from xxhash import xxh3_128_digest

    return lambda parent, tokens: xxh3_128_digest(_packed(parent, tokens))


def _xxhash_cbor() -> Hasher:
    from xxhash import xxh3_128_digest

    written = _cbor()
    return lambda parent, tokens: xxh3_128_digest(written(parent, tokens))


def _builtin() -> Hasher:
    return lambda parent, tokens: hash((parent, tuple(tokens))).to_bytes(8, "little", signed=True)


def _packed(parent: bytes, tokens: Sequence[int]) -> bytes:
    return parent + array("q", tokens).tobytes()


def _cbor() -> Hasher:
    """Canonical CBOR (RFC 8949, 4.2) of the array [parent, [token, ...], null], which any language can write."""
    from cbor2 import dumps

    return lambda parent, tokens: dumps((parent, tuple(tokens), None), canonical=True)


HASHERS: dict[str, Callable[[], Hasher]] = {
    "sha256": _sha256,
    "sha256_cbor": _sha256_cbor,
    "xxhash": _xxhash,
    "xxhash_cbor": _xxhash_cbor,
    "builtin": _builtin,
}
"""Makers of hashers; those that need a library import it. `builtin`, Python's own 64-bit hash, and XXH3 of 128 bits are
quicker than SHA-256, and do not protect against made-up collisions."""


def root_digest(root: bytes, *scope: str | None) -> bytes:
    """Compute the parent of a first block. `root` is random, so that no digest can be computed outside.

    Each part of `scope` is written with its length, and None differs from the empty string: no two scopes agree.
    """
    parts = [len(root).to_bytes(4, "little"), root]
    for text in scope:
        data = b"" if text is None else text.encode("utf-8", "surrogatepass")
        parts += [b"\0" if text is None else b"\1", len(data).to_bytes(4, "little"), data]
    return sha256(b"".join(parts)).digest()


class HashChain:
    """The digests of one request's full blocks, computed once, when a block's last token is known.

    The digest of a block in which a media item has a part depends on the item, and on where in it the block begins.
    """

    __slots__ = ("_block_size", "_hasher", "_media", "_passed", "_root", "digests")

    def __init__(self, root: bytes, block_size: int, hasher: Hasher, media: Sequence[MediaItem] = ()) -> None:
        self._root = root
        self._media = media
        self._passed = 0  # items that end before the next block
        self._block_size = block_size
        self._hasher = hasher
        self.digests: list[bytes] = []

    def grow(self, ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Return the digests of at least the first `num_blocks` blocks of `ids`. Ids that were hashed never change."""
        size = self._block_size
        digests = self.digests
        while len(digests) < num_blocks:
            first = len(digests) * size
            parent = digests[-1] if digests else self._root
            if self._passed < len(self._media):
                parent = self._mixed(parent, first)
            digests.append(self._hasher(parent, ids[first : first + size]))
        return digests

    def _mixed(self, parent: bytes, first: int) -> bytes:
        """Mix the digests of media items in the block from position `first` on into `parent`, where there are any."""
        parts = []
        for item in self._media[self._passed :]:
            if item.start >= first + self._block_size:
                break
            if item.start + item.count <= first:
                self._passed += 1
                continue
            parts += [item.digest, (first - item.start).to_bytes(8, "little", signed=True)]
        return root_digest(parent, *(part.hex() for part in parts)) if parts else parent
