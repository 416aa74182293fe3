"""API keys: hashed at start, compared in constant time, all of them each time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from ferrule.config import Config
from ferrule.errors import UnauthorisedError
from ferrule.interfaces.http import Access

# The routes that need no key, ever. A plugin cannot add to them.
PUBLIC = frozenset({("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/version")})
PUBLIC_METRICS = frozenset({("GET", "/metrics")})  # and this one with --public-metrics


class Keys:
    """The server's keys. Without any, everybody is let in; an admin key alone guards the admin routes alone."""

    def __init__(self, keys: Iterable[str], admin: str | None = None) -> None:
        digests = tuple(_digest(key.encode()) for key in keys if key)
        self._digests = {Access.KEY: digests, Access.ADMIN: (_digest(admin.encode()),) if admin else digests}
        self._separate = bool(admin)
        self.several = len(set(digests)) > 1

    @classmethod
    def of(cls, config: Config) -> Keys:
        """`--api-key` and `--admin-key`, which the environment may have set."""
        return cls(config.frontend.api_key, config.frontend.admin_key)

    def check(self, authorizations: list[bytes], access: Access) -> None:
        """Raise UnauthorisedError unless the one Authorization header carries a key for this kind of route."""
        digests = self._digests[access]
        if not digests:
            return
        scheme, _, key = authorizations[0].partition(b" ") if len(authorizations) == 1 else (b"", b"", b"")
        presented = _digest(key.strip())
        matches = [hmac.compare_digest(presented, digest) for digest in digests]
        if scheme.lower() != b"bearer" or not any(matches):
            what = "The admin key" if self._separate and access is Access.ADMIN else "A valid API key"
            raise UnauthorisedError(f"{what} is needed: send the header 'Authorization: Bearer KEY'.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
