"""API keys: hashed at start, compared in constant time, all of them each time."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable

from ferrule.callers import Caller, Callers
from ferrule.config import Config
from ferrule.errors import UnauthorisedError
from ferrule.interfaces.router import Access
from ferrule.wire.board import Board

# The routes that need no key, ever. A plugin cannot add to them.
PUBLIC = frozenset({("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/version")})
PUBLIC_METRICS = frozenset({("GET", "/metrics")})  # and this one with --public-metrics


class Keys:
    """The server's keys. Without any, everybody is let in; an admin key alone guards the admin routes alone.

    The admin routes are opened by `--admin-key` and by keys that the file marks as the administrators'; if there are
    none of either, by every key.
    """

    def __init__(self, config: Config, board: Board | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError."""
        self.callers = Callers(config, board, clock)
        self.take(config)

    def take(self, config: Config) -> None:
        """The keys of this configuration, and of the file as it is now. Raises ConfigError: all stay as they were."""
        self.callers.read(config)
        admin = config.frontend.admin_key
        self._admin = hashlib.sha256(admin.encode()).digest() if admin else None

    def check(self, authorizations: list[bytes], access: Access) -> Caller | None:
        """Whose key the one Authorization header has; None where no key is needed, and for `--admin-key`.

        Raises UnauthorisedError unless it is a key for this kind of route.
        """
        separate = self._admin is not None or self.callers.any_admin
        administers = access is Access.ADMIN and separate
        if not administers and not self.callers:
            return None
        scheme, _, key = authorizations[0].partition(b" ") if len(authorizations) == 1 else (b"", b"", b"")
        found = self.callers.find(key.strip())
        admin = self._admin is not None and hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._admin)
        if scheme.lower() == b"bearer":
            if administers and (admin or (found is not None and found.admin)):
                return found
            if not administers and found is not None:
                return found
        what = "The admin key" if administers else "A valid API key"
        raise UnauthorisedError(f"{what} is needed: send the header 'Authorization: Bearer KEY'.")
