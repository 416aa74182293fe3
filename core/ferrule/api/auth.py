"""API keys, and which kind of route needs which."""

from __future__ import annotations

from collections.abc import Iterable

from ferrule.api.keys import KeyRing
from ferrule.config import Config
from ferrule.errors import UnauthorisedError
from ferrule.interfaces.http import Access

# The routes that need no key, ever. A plugin cannot add to them.
PUBLIC = frozenset({("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/version")})
PUBLIC_METRICS = frozenset({("GET", "/metrics")})  # and this one with --public-metrics


class Keys:
    """The server's keys. Without any, everybody is let in; an admin key alone guards the admin routes alone."""

    def __init__(self, keys: Iterable[str], admin: str | None = None) -> None:
        ring = KeyRing(keys)
        self._rings = {Access.KEY: ring, Access.ADMIN: KeyRing([admin]) if admin else ring}
        self._separate = bool(admin)

    @classmethod
    def of(cls, config: Config) -> Keys:
        """`--api-key` and `--admin-key`, which the environment may have set."""
        return cls(config.frontend.api_key, config.frontend.admin_key)

    def check(self, authorizations: list[bytes], access: Access) -> None:
        """Raise UnauthorisedError unless the one Authorization header carries a key for this kind of route."""
        if not self._rings[access].admits(authorizations):
            what = "The admin key" if self._separate and access is Access.ADMIN else "A valid API key"
            raise UnauthorisedError(f"{what} is needed: send the header 'Authorization: Bearer KEY'.")
