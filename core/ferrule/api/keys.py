"""Comparing keys: hashed at start, compared in constant time, all of them each time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence


class KeyRing:
    """Keys of which one must be presented; without any, nothing needs to be."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys if key)

    def admits(self, authorizations: Sequence[bytes]) -> bool:
        """Whether there is exactly one Authorization header, and it carries one of the keys."""
        if not self._digests:
            return True
        scheme, _, key = authorizations[0].partition(b" ") if len(authorizations) == 1 else (b"", b"", b"")
        presented = _digest(key.strip())
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
