"""The routes behind the frame: those of the chosen routers, each with who may call it and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute, APIRouter, iter_route_contexts
from pydantic import TypeAdapter

from ferrule import __version__
from ferrule.api.auth import PUBLIC, PUBLIC_METRICS
from ferrule.api.document import describe
from ferrule.api.endpoints import body_type, endpoint_of
from ferrule.api.errors import log_unexpected
from ferrule.api.fields import Shape
from ferrule.api.paths import Entry, PathTable, routes_of
from ferrule.config import Config
from ferrule.errors import NotFoundError, StartupError
from ferrule.interfaces.dialect import OPENAI, Dialect, Failure, encode
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.router import Access, RouterContext, needs_of
from ferrule.plugin import Component, check_plugins
from ferrule.plugin.faults import fault_logger, log_fault

_ADMIN_IS_OFF = "Routes for administration are off; FERRULE_SERVER_DEV_MODE=1 switches them on."
_TRIAL = Failure(status=404, kind=NotFoundError.kind, message="This route does not exist.")  # to try a dialect with
_COPIED = [name for name in inspect.signature(APIRoute).parameters if name != "form_limits"]


def assemble(config: Config, plugins: Plugins, context: RouterContext) -> tuple[FastAPI, PathTable]:
    """The application, and the table of its paths. Raises StartupError, PluginError."""
    entries: list[Entry] = []
    absent: dict[str, str] = {}
    dialects: dict[str, Dialect] = {}
    public = PUBLIC | (PUBLIC_METRICS if config.frontend.public_metrics else frozenset())
    check_plugins(plugins, (), Component.HTTP)
    for name in plugins.chosen("router", config.frontend.routers):
        asked = _asked(plugins, name, context)
        entries += asked.entries
        absent |= asked.absent
        for path in asked.dialect.paths:
            if type(dialects.setdefault(path, asked.dialect)) is not type(asked.dialect):
                raise StartupError(f"Two routers have a dialect for {path}.", "Choose among them with --routers.")
    for entry in entries:
        if entry.access is Access.PUBLIC and ((entry.method, entry.path) not in public or entry.body is not None):
            raise StartupError(f"Route {entry.method} {entry.path} may not be public.")
    if not config.env.server_dev_mode:
        absent |= {entry.path: _ADMIN_IS_OFF for entry in entries if entry.access is Access.ADMIN}
        entries = [entry for entry in entries if entry.access is not Access.ADMIN]
    return application(config, entries), PathTable(entries, absent, dialects)


@dataclass(frozen=True)
class _Asked:
    """The answers of one router: its routes, what it says of absent ones, its dialect."""

    entries: Sequence[Entry]
    absent: Mapping[str, str]
    dialect: Dialect


def _asked(plugins: Plugins, name: str, context: RouterContext) -> _Asked:
    router = plugins.make("router", name)
    faults = fault_logger(plugins, partial(log_fault, plugins.title("router", name)))
    with plugins.blamed("router", name):
        dialect = router.dialect(context)
        encode(dialect.error(_TRIAL))  # one that fails to do so stops the start
        entries = list(entries_of(router.router(context), faults, dialect))
        return _Asked(entries, router.absent(context), dialect)


def entries_of(
    router: APIRouter, faults: Callable[[str], None] = log_unexpected, dialect: Dialect = OPENAI
) -> Iterator[Entry]:
    """A router's routes by method; those of routers that it includes are made anew with what the inclusion adds.

    `faults` logs what a route's handler raises.
    """
    for found in iter_route_contexts(router.routes):
        route = found.original_route
        if not isinstance(route, APIRoute):
            kind = type(route).__name__
            raise StartupError(f"{found.path}: a router may have path operations (`@router.get` …) only, not a {kind}.")
        if found.path != route.path or found.dependencies != route.dependencies or found.tags != route.tags:
            route = APIRoute(**{name: getattr(found, name) for name in _COPIED})
        adapter = body_type(route)
        body = None if adapter is None else _shape(adapter)
        endpoint, needed = endpoint_of(route, adapter), needs_of(route)
        for method in sorted(route.methods or ()):
            yield Entry(route, method, needed.access, body, endpoint, faults, needed.room, dialect)


@lru_cache(maxsize=128)
def _shape(adapter: TypeAdapter[Any]) -> Shape:
    """Most of what routes cost to make is the schema of their bodies."""
    return Shape.of(adapter.json_schema())


def application(config: Config, entries: Sequence[Entry]) -> FastAPI:
    """FastAPI with these routes, for its description of them and for ``request.app``. It is never called itself."""
    app = FastAPI(
        title="Ferrule",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )
    app.router.routes[:] = routes_of(entries)
    app.openapi = partial(_described, app, config, entries)  # type: ignore[method-assign]
    return app


def _described(app: FastAPI, config: Config, entries: Sequence[Entry]) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = describe(entries, config)
    return app.openapi_schema
