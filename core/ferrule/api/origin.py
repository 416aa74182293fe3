"""Checks of Host and Origin against requests that another site's page makes a browser send.

A page can have its own domain resolve to the server's address (DNS rebinding): the browser then takes the server for
the page's own, and sends the page's domain as Host. And a page can send some POST requests anywhere without asking
first (https://fetch.spec.whatwg.org/#cors-safelisted-request-header), with a body that may well be JSON.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from ferrule.errors import ForbiddenError, RequestError

_HOST = re.compile(r"(?P<name>[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{0,5}))?")
# Domains that nobody outside a network can register: RFC 6761, 6762 and 8375, ICANN's "internal", Kubernetes' "svc".
_PRIVATE = ("localhost", "local", "internal", "lan", "home.arpa", "svc", "cluster.local", "test")
_SIMPLE_TYPES = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")


def host_of(values: list[bytes]) -> str:
    """Return the host that the Host headers name, in lower case and without its port; empty where there is none.

    Raises RequestError when there are several headers, or the value is not a host (RFC 9112 section 3.2).
    """
    if not values:
        return ""
    if len(values) > 1:
        raise RequestError(f"A request has one Host header, not {len(values)}.", "Host")
    found = _HOST.fullmatch(values[0].strip().decode("latin-1"))
    if found is None or int(found["port"] or 0) > 65535:
        raise RequestError("The Host header is not a host name or an address.", "Host")
    return found["name"].lower().rstrip(".")


class Hosts:
    """Host names under which a server without keys answers: addresses, names that no outsider can own, and `told`."""

    def __init__(self, told: Iterable[str]) -> None:
        names = {name.lower().rstrip(".") for name in told}
        self._any = "*" in names
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._names = names | {socket.gethostname().lower()}

    def check(self, host: str) -> None:
        """Raise ForbiddenError for a domain that a server without API keys was not told of."""
        private = "." not in host or host.endswith(tuple(f".{domain}" for domain in _PRIVATE))
        if self._any or private or host in self._names or host.endswith(self._suffixes or ("\0",)) or _address(host):
            return
        raise ForbiddenError(
            "The server has no API key, so it does not answer under a domain that it was not told of: start it with "
            "--allowed-hosts NAME, or with --api-key.",
            "Host",
        )


def check_origin(origin: str, host: str, content_type: str, authorised: bool, allowed: Iterable[str]) -> None:
    """Raise ForbiddenError for a request that another origin's page sends without its browser having asked first.

    A browser asks before it sends an Authorization header or a content type such as application/json: such requests
    have passed the CORS middleware.
    """
    if not origin or _same(origin, host):
        return
    if not authorised and content_type.partition(";")[0].strip().lower() in _SIMPLE_TYPES:
        raise ForbiddenError("A request from another origin needs Content-Type: application/json.", "Origin")
    origins = set(allowed)
    if "*" not in origins and origin not in origins:
        raise ForbiddenError("Requests from this origin are not allowed: see --allowed-origins.", "Origin")


def _same(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.strip().lower()
    except ValueError:
        return False


def _address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True
