"""Which route a path means: exact bytes, nothing is normalised, so nothing can be confused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from fastapi.routing import APIRoute

from ferrule.api.endpoints import Endpoint
from ferrule.api.errors import log_unexpected
from ferrule.api.fields import Shape
from ferrule.errors import MethodError, NotFoundError, StartupError, nearest
from ferrule.interfaces.dialect import OPENAI, Dialect
from ferrule.interfaces.router import Access
from ferrule.schema import printable

T = TypeVar("T")

_SHOWN = 128  # characters of a path that an error repeats


@dataclass(frozen=True)
class Entry:
    """One method of one path. `body` is what its JSON body may hold; None when FastAPI reads no JSON for the route.

    `log_fault` logs the exception that is being handled as a fault of the router. `room`: it needs room in the queue.
    """

    route: APIRoute
    method: str
    access: Access
    body: Shape | None
    endpoint: Endpoint
    log_fault: Callable[[str], None] = log_unexpected
    room: bool = False
    dialect: Dialect = OPENAI

    @property
    def path(self) -> str:
        """The template."""
        return self.route.path


def routes_of(entries: Iterable[Entry]) -> list[APIRoute]:
    """Each once, though it may have several methods."""
    return list({id(entry.route): entry.route for entry in entries}.values())


class PathTable:
    """Built once. A template's `{name}` stands for one segment; a last `{name:path}` for the rest of the path.

    `absent` says of paths that are not there, or with a last `/` of all below them, what would be right; `dialects`
    how errors look there.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        absent: Mapping[str, str] | None = None,
        dialects: Mapping[str, Dialect] | None = None,
    ) -> None:
        self._absent = dict(absent or {})
        self._dialects = dict(dialects or {})
        self._exact: dict[str, dict[str, Entry]] = {}
        self._templates: dict[tuple[str, ...], dict[str, Entry]] = {}
        for entry in entries:
            self._add(entry)

    def _add(self, entry: Entry) -> None:
        path = entry.path
        if "{" in path:
            methods = self._templates.setdefault(tuple(path.split("/")), {})
        else:
            methods = self._exact.setdefault(path, {})
        if entry.method in methods:
            raise StartupError(f"Two routers serve {entry.method} {path}.", "Choose among them with --routers.")
        methods[entry.method] = entry

    def methods(self, path: str) -> tuple[dict[str, Entry], dict[str, str]]:
        """What a raw path offers, by method, and its parameters; empty when there is no such path."""
        if found := self._exact.get(path):
            return found, {}
        segments = path.split("/")
        for template, found in self._templates.items():
            params = _match(template, segments)
            if params is not None:
                return found, params
        return {}, {}

    def dialect(self, method: str, path: str) -> Dialect:
        """Return the dialect of answers to a call, whether there is such a route or not."""
        found, _ = self.methods(path)
        if entry := found.get(method) or next(iter(found.values()), None):
            return entry.dialect
        return _covering(self._dialects, path[:_SHOWN]) or OPENAI

    def find(self, method: str, path: str) -> tuple[Entry, dict[str, str]]:
        """The entry for a call. Raises NotFoundError with the nearest route, MethodError with the right methods."""
        found, params = self.methods(path)
        if not found:
            raise NotFoundError(f"There is no route {printable(path, _SHOWN)}.{self._advice(path[:_SHOWN])}")
        entry = found.get(method) or (found.get("GET") if method == "HEAD" else None)
        if entry is None:
            allowed = allowed_methods(found)
            raise MethodError(f"This route takes {', '.join(allowed)}.", allowed)
        return entry, params

    def _advice(self, path: str) -> str:
        """What a wrong path may have meant. Admin routes are not told: the caller may lack their key."""
        tidy = _tidy(path)
        if tidy != path and (found := self.methods(tidy)[0]) and access_of(found) is not Access.ADMIN:
            return f" Did you mean '{printable(tidy, _SHOWN)}'? Paths are compared byte for byte."
        if said := _covering(self._absent, tidy):
            return f" {said}"
        return nearest(path, [name for name, found in self._exact.items() if access_of(found) is not Access.ADMIN])


def raw_path(scope: Mapping[str, Any]) -> bytes:
    """Return the path of an ASGI scope, byte for byte as the client sent it."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw


def access_of(methods: Mapping[str, Entry]) -> Access:
    """What it takes to be told of a path."""
    return Access.ADMIN if any(entry.access is Access.ADMIN for entry in methods.values()) else Access.KEY


def allowed_methods(methods: Iterable[str]) -> list[str]:
    """For the Allow header."""
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


def _match(template: tuple[str, ...], segments: list[str]) -> dict[str, str] | None:
    params: dict[str, str] = {}
    for place, part in enumerate(template):
        if place >= len(segments):
            return None
        if not part.startswith("{"):
            if part != segments[place]:
                return None
            continue
        name, _, kind = part[1:-1].partition(":")
        raw = "/".join(segments[place:]) if kind == "path" else segments[place]
        try:
            value = unquote_to_bytes(raw).decode("utf-8")
        except UnicodeDecodeError:
            return None
        if not value or not value.isprintable():
            return None
        params[name] = value
        if kind == "path":
            return params
    return params if len(template) == len(segments) else None
