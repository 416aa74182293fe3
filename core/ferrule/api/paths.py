"""The table of what each path offers, for the edge around the application. FastAPI itself routes the call.

Paths are compared byte for byte as they arrive; escapes are only for values of parameters. A path that would match
another route once decoded is treated as absent, so that the edge and FastAPI never disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

from fastapi.routing import RouteContext

from ferrule.api.errors import log_unexpected
from ferrule.errors import MethodError, NotFoundError, RequestError, StartupError, nearest
from ferrule.interfaces.dialect import OPENAI, Dialect
from ferrule.interfaces.router import Access
from ferrule.schema import printable

T = TypeVar("T")

_MAX_QUERY_FIELDS = 64
_SHOWN = 128  # characters of a path that an error repeats
ADMIN_IS_OFF = "Routes for administration are off; FERRULE_SERVER_DEV_MODE=1 switches them on."


@dataclass(frozen=True, eq=False)
class Entry:
    """One method of one path. `body` is the type of its JSON body; None when FastAPI reads no JSON for the route.

    `path` is the route's template. `log_fault` logs the exception that is being handled as a fault of the router.
    `room`: it needs room in the queue.
    """

    route: RouteContext
    path: str
    method: str
    access: Access
    body: Any = None
    log_fault: Callable[[str], None] = log_unexpected
    room: bool = False
    dialect: Dialect = OPENAI
    max_body_bytes: int | None = None  # instead of the server's limit


@dataclass(frozen=True)
class Found:
    """The table's knowledge about a call: the routes of its path by method, and the one that serves it, if any does."""

    path: str  # as it came, without the server's root
    plain: str  # the same without escapes; empty where that would not be printable text
    methods: Mapping[str, Entry]
    entry: Entry | None
    dialect: Dialect  # of the answer, whether there is such a route or not
    access: Access  # that a caller needs, be it to be told what the path offers


class PathTable:
    """A table of routes, in the order in which FastAPI tries them.

    `root` is the prefix below which a proxy has the server; calls come with and without it. `admin` says whether routes
    for administration are served; FastAPI has them in any case. `absent` maps paths that are not served to advice for
    the caller, and `dialects` maps paths to the dialect of errors there; a path that ends in `/` stands for all paths
    below it.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        root: str = "",
        admin: bool = True,
        absent: Mapping[str, str] | None = None,
        dialects: Mapping[str, Dialect] | None = None,
    ) -> None:
        self.root = "/" + root.strip("/") if root.strip("/") else ""
        self._entries = tuple(entries)
        self._absent = dict(absent or {})
        self._dialects = dict(dialects or {})
        claimed: set[tuple[str, str]] = set()
        for entry in self._entries:
            if (entry.method, entry.path) in claimed:
                what = f"Two routers serve {entry.method} {entry.path}."
                raise StartupError(what, "Choose among them with --routers.")
            claimed.add((entry.method, entry.path))
            if entry.access is Access.ADMIN and not admin:
                self._absent[entry.path] = ADMIN_IS_OFF
        self._hidden = frozenset() if admin else frozenset({Access.ADMIN})
        self._exact = {path: self._matching(path) for _, path in claimed if "{" not in path}

    def find(self, raw: bytes, method: str = "") -> Found:
        """Return what the table has for a method of a raw path. HEAD is served as GET.

        A path whose escaped and plain forms lead to different routes has none.
        """
        path = raw.partition(b"?")[0].decode("latin-1")
        if self.root and path.startswith(self.root + "/"):
            path = path[len(self.root) :]
        methods, plain = self._exact.get(path), path
        if methods is None:
            plain, methods = unescaped(path) or "", self._matching(path)
            if plain != path and self._matching(plain) != methods:
                methods = {}
        entry = methods.get(method) or (methods.get("GET") if method == "HEAD" else None)
        first = entry or next(iter(methods.values()), None)
        dialect = _covering(self._dialects, path[:_SHOWN]) or OPENAI if first is None else first.dialect
        return Found(path, plain, methods, entry, dialect, access_of(methods) if entry is None else entry.access)

    def _matching(self, path: str) -> dict[str, Entry]:
        """Return the first entry of each method whose expression matches: the one that FastAPI would choose."""
        found: dict[str, Entry] = {}
        for entry in self._entries:
            if match := entry.route.path_regex.match(path):
                if not all(match.groups()):
                    return {}  # a parameter is empty
                found.setdefault(entry.method, entry)
        return {method: entry for method, entry in found.items() if entry.access not in self._hidden}

    def dialect_of(self, raw: bytes) -> Dialect:
        """Return the dialect for a path whose call fails before it is routed."""
        return self.find(raw).dialect

    def refusal(self, found: Found) -> RequestError:
        """Return the error for a call without an entry: it names the nearest route, or the methods of the path."""
        path = found.path
        own = any(entry.path == path for entry in found.methods.values())
        if found.methods and not own and (said := self._absent.get(path)):
            # The path only looks like a value of another route's parameter.
            return NotFoundError(f"There is no route {path}. {said}")
        if found.methods:
            allowed = allowed_methods(found.methods)
            return MethodError(f"This route takes {', '.join(allowed)}.", allowed)
        return NotFoundError(f"There is no route {printable(path, _SHOWN)}.{self._advice(path[:_SHOWN])}")

    def _advice(self, path: str) -> str:
        """Return advice on what a wrong path may have meant, or an empty text.

        Admin routes are not named, because the caller may lack their key.
        """
        tidy = _tidy(path)
        methods = self.find(tidy.encode("latin-1")).methods if tidy != path else {}
        if methods and not access_of(methods).administers:
            return f" Did you mean '{printable(tidy, _SHOWN)}'? Paths are compared byte for byte."
        if said := _covering(self._absent, tidy):
            return f" {said}"
        told = [name for name, found in self._exact.items() if found and not access_of(found).administers]
        return nearest(path, told)


def raw_path(scope: Mapping[str, Any]) -> bytes:
    """Return the path of an ASGI scope, byte for byte as the client sent it."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw


def check_query(scope: Mapping[str, Any]) -> None:
    """Raise RequestError for a query string that is malformed or too long."""
    try:
        parse_qsl(scope["query_string"].decode("ascii"), True, max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError:
        raise RequestError("The query string is malformed or has too many fields.") from None


def unescaped(path: str) -> str | None:
    """Return a path without escapes; None where the result would not be printable text."""
    try:
        plain = unquote_to_bytes(path.encode("latin-1")).decode("utf-8")
    except UnicodeDecodeError:
        return None
    return plain if plain.isprintable() else None


def access_of(methods: Mapping[str, Entry]) -> Access:
    """Return the access that a caller needs to be told what a path offers."""
    return Access.OPERATOR if any(entry.access.administers for entry in methods.values()) else Access.KEY


def allowed_methods(methods: Iterable[str]) -> list[str]:
    """Return the methods for the Allow header, sorted; GET implies HEAD."""
    names = set(methods)
    return sorted(names | ({"HEAD"} if "GET" in names else set()))


def _tidy(path: str) -> str:
    return "/" + "/".join(filter(None, path.split("/")))


def _covering(table: Mapping[str, T], path: str) -> T | None:
    """Return what a table has for a path, or else for the nearest place above it that ends in ``/``."""
    path = _tidy(path)
    found, place = table.get(path), f"{path}/"
    while found is None and place.strip("/"):
        found = table.get(place)
        place = place.rstrip("/").rpartition("/")[0] + "/"
    return found
