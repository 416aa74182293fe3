"""Who calls, and whether they may: API keys, the hooks that authorise, and what only a misled browser sends."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ferrule.api.origin import Hosts, check_origin, host_of
from ferrule.api.paths import Found
from ferrule.api_keys import Caller, Callers
from ferrule.config import Config
from ferrule.errors import UnauthorisedError
from ferrule.hooks import HookRunner
from ferrule.interfaces.dialect import Dialect
from ferrule.interfaces.hooks import AccessRequest
from ferrule.interfaces.router import ON_BEHALF, Access
from ferrule.shared_memory.board import Board

# The routes that need no key, ever. A plugin cannot add to them.
_PROBES = {("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/version")}
_PAGE = {("GET", "/ui"), ("GET", "/ui/{file}")}  # the page asks for the key; its files hold nothing of this server
PUBLIC = frozenset(_PROBES | _PAGE)
PUBLIC_METRICS = frozenset({("GET", "/metrics")})  # and this one with --public-metrics

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

Headers = Iterable[tuple[bytes, bytes]]  # of a request, names in lower case


class CallerCheck:
    """The check of all calls but public ones. Without any key everybody is let in; an admin key alone guards only the
    admin routes.

    Keys are hashed at start; each check compares against all of them, in constant time. The admin routes accept
    `--admin-key` and the keys that the key file marks as administrators'; if neither exists, they accept every key.
    """

    def __init__(
        self,
        config: Config,
        hooks: HookRunner | None = None,
        board: Board | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the keys of the configuration and of its key file. Raises ConfigError."""
        self.keys = Callers(config, board, clock)
        self._front = config.frontend
        self._hooks = hooks or HookRunner()
        self._hosts = Hosts((*config.frontend.allowed_hosts, config.frontend.host or ""))
        self.take(config)

    def take(self, config: Config) -> None:
        """Replace the keys by those of `config` and of the key file's present content.

        Raises ConfigError; the keys then stay as they were.
        """
        self.keys.read(config)
        admin = config.frontend.admin_key
        self._admin = hashlib.sha256(admin.encode()).digest() if admin else None

    def check(self, scope: Mapping[str, Any], headers: Mapping[str, str], found: Found) -> Caller | None:
        """Return the caller whose key a call has; None where no key is needed, a hook lets the call in, and for
        `--admin-key`.

        Raises UnauthorisedError, and ForbiddenError for a call that only a browser sends when another site's page
        misleads it.
        """
        if (name := scope.get(ON_BEHALF)) is not None:
            return self._on_behalf(name)
        if not self.keys:
            self._hosts.check(host_of([value for name, value in scope["headers"] if name == b"host"]))
        if scope["method"] not in _SAFE_METHODS and (origin := headers.get("origin")):
            content_type = headers.get("content-type", "")
            authorised = any(name in headers for name in ("authorization", *found.dialect.key_headers))
            check_origin(origin, headers.get("host", ""), content_type, authorised, self._front.allowed_origins)
        client = (scope.get("client") or ("",))[0]
        verdict = self._hooks.authorise(AccessRequest(scope["method"], found.path, headers, client))
        if verdict is False:
            raise UnauthorisedError("Not authorised.")
        if verdict is True or not (self.keys or self._admin):
            return None
        return self._owner(scope["headers"], found.access, found.dialect)

    def _owner(self, headers: Headers, access: Access, dialect: Dialect) -> Caller | None:
        """Return the owner of the call's key. Raises UnauthorisedError unless the key opens this kind of route."""
        separate = self._admin is not None or self.keys.any_admin
        administers = access.administers and separate
        if not administers and not self.keys:
            return None
        key = key_of(headers, dialect)
        found = self.keys.find(key or b"")
        admin = self._admin is not None and hmac.compare_digest(hashlib.sha256(key or b"").digest(), self._admin)
        if key is not None:
            if administers and (admin or (found is not None and found.admin)):
                return found
            if not administers and found is not None:
                return found
        what = "The admin key" if administers else "A valid API key"
        header = f"{dialect.key_headers[0]}: KEY" if dialect.key_headers else "Authorization: Bearer KEY"
        raise UnauthorisedError(f"{what} is needed: send the header '{header}'.")

    def _on_behalf(self, name: str) -> Caller | None:
        """Return the caller for whom the server itself sends a request. Raises UnauthorisedError when the key is gone.

        An empty name stands for a caller who needed no key.
        """
        caller = self.keys.named(name)
        if name and caller is None:
            raise UnauthorisedError("The API key that this request was made with is no longer valid.")
        return caller


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
