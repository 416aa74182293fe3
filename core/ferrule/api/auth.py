"""API keys: hashed at start, compared in constant time, all of them each time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from ferrule.config import Config
from ferrule.errors import UnauthorisedError

# The routes that need no key, ever. A plugin cannot add to them.
PUBLIC = frozenset({("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/version")})


class Keys:
    """The server's keys. Without any, everybody is let in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys if key)

    @classmethod
    def of(cls, config: Config) -> Keys:
        """`--api-key`, or else the environment's key."""
        return cls(config.frontend.api_key or ((config.env.api_key,) if config.env.api_key else ()))

    def check(self, authorizations: list[bytes]) -> None:
        """Raise UnauthorisedError unless the one Authorization header carries a key."""
        if not self._digests:
            return
        scheme, _, key = authorizations[0].partition(b" ") if len(authorizations) == 1 else (b"", b"", b"")
        presented = _digest(key.strip())
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise UnauthorisedError("A valid API key is needed: send the header 'Authorization: Bearer KEY'.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
