"""API keys: hashed at start; each check compares against all of them, in constant time."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable

from ferrule.api_keys import Caller, Callers
from ferrule.config import Config
from ferrule.errors import UnauthorisedError
from ferrule.interfaces.dialect import Dialect
from ferrule.interfaces.router import Access
from ferrule.shared_memory.board import Board

# The routes that need no key, ever. A plugin cannot add to them.
_PROBES = {("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/version")}
_PAGE = {("GET", "/ui"), ("GET", "/ui/{file}")}  # the page asks for the key; its files hold nothing of this server
PUBLIC = frozenset(_PROBES | _PAGE)
PUBLIC_METRICS = frozenset({("GET", "/metrics")})  # and this one with --public-metrics


Headers = Iterable[tuple[bytes, bytes]]  # of a request, names in lower case


class Keys:
    """The server's API keys. Without any key everybody is let in; an admin key alone guards only the admin routes.

    The admin routes accept `--admin-key` and the keys that the key file marks as administrators'; if neither exists,
    they accept every key.
    """

    def __init__(self, config: Config, board: Board | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the keys of the configuration and of its key file. Raises ConfigError."""
        self.callers = Callers(config, board, clock)
        self.take(config)

    def take(self, config: Config) -> None:
        """Replace the keys by those of `config` and of the key file's present content.

        Raises ConfigError; the keys then stay as they were.
        """
        self.callers.read(config)
        admin = config.frontend.admin_key
        self._admin = hashlib.sha256(admin.encode()).digest() if admin else None

    def check(self, headers: Headers, access: Access, dialect: Dialect) -> Caller | None:
        """Return the caller whose key a request has; None where no key is needed, and for `--admin-key`.

        Raises UnauthorisedError unless the key is valid for this kind of route.
        """
        separate = self._admin is not None or self.callers.any_admin
        administers = access is Access.ADMIN and separate
        if not administers and not self.callers:
            return None
        key = key_of(headers, dialect)
        found = self.callers.find(key or b"")
        admin = self._admin is not None and hmac.compare_digest(hashlib.sha256(key or b"").digest(), self._admin)
        if key is not None:
            if administers and (admin or (found is not None and found.admin)):
                return found
            if not administers and found is not None:
                return found
        what = "The admin key" if administers else "A valid API key"
        header = f"{dialect.key_headers[0]}: KEY" if dialect.key_headers else "Authorization: Bearer KEY"
        raise UnauthorisedError(f"{what} is needed: send the header '{header}'.")


def key_of(headers: Headers, dialect: Dialect) -> bytes | None:
    """Return the key that a request brings; None if the request brings no key or repeats the header that counts."""
    for name in (*dialect.key_headers, "authorization"):
        values = [value.strip() for given, value in headers if given == name.encode("latin-1")]
        if len(values) == 1:
            return values[0] if name in dialect.key_headers else _bearer(values[0])
        if values:
            return None
    return None


def _bearer(authorization: bytes) -> bytes | None:
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None
