"""The FastAPI application behind the frame: the chosen routers' routes, each with who may call it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.params import Form
from fastapi.routing import APIRoute, APIRouter, iter_route_contexts
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from ferrule import __version__
from ferrule.api.auth import PUBLIC, PUBLIC_METRICS
from ferrule.api.document import describe
from ferrule.api.fields import Shape
from ferrule.api.paths import Entry, PathTable, routes_of
from ferrule.config import Config
from ferrule.errors import PluginError, StartupError
from ferrule.interfaces.http import Access, RouterContext, access_of
from ferrule.interfaces.plugins import Plugins

_ADMIN_IS_OFF = "Routes for administration are off; FERRULE_SERVER_DEV_MODE=1 switches them on."
_COPIED = [name for name in inspect.signature(APIRoute).parameters if name != "form_limits"]


def assemble(config: Config, plugins: Plugins, context: RouterContext) -> tuple[FastAPI, PathTable]:
    """The application, and the table of its paths. Raises StartupError, PluginError."""
    entries: list[Entry] = []
    absent: dict[str, str] = {}
    public = PUBLIC | (PUBLIC_METRICS if config.frontend.public_metrics else frozenset())
    for name in plugins.chosen("router", config.frontend.routers):
        found, advice = _asked(plugins, name, context)
        entries += found
        absent |= advice
    for entry in entries:
        if entry.access is Access.PUBLIC and ((entry.method, entry.path) not in public or entry.body is not None):
            raise StartupError(f"Route {entry.method} {entry.path} may not be public.")
    if not config.env.server_dev_mode:
        absent |= {entry.path: _ADMIN_IS_OFF for entry in entries if entry.access is Access.ADMIN}
        entries = [entry for entry in entries if entry.access is not Access.ADMIN]
    return application(config, entries), PathTable(entries, absent)


def _asked(plugins: Plugins, name: str, context: RouterContext) -> tuple[Sequence[Entry], Mapping[str, str]]:
    router = plugins.make("router", name)
    try:
        return list(entries_of(router.router(context))), router.absent(context)
    except StartupError:
        raise
    except Exception as error:
        origin = plugins.origin("router", name)
        raise PluginError(f"Router {name} of {origin} has no routes: {type(error).__name__}: {error}") from error


def entries_of(router: APIRouter) -> Iterator[Entry]:
    """A router's routes by method; those of routers that it includes are made anew with what the inclusion adds."""
    for found in iter_route_contexts(router.routes):
        route = found.original_route
        if not isinstance(route, APIRoute):
            kind = type(route).__name__
            raise StartupError(f"{found.path}: a router may have path operations (`@router.get` …) only, not a {kind}.")
        if found.path != route.path or found.dependencies != route.dependencies or found.tags != route.tags:
            route = APIRoute(**{name: getattr(found, name) for name in _COPIED})
        body = _body_of(route)
        for method in sorted(route.methods or ()):
            yield Entry(route, method, access_of(route), body)


def _body_of(route: APIRoute) -> Shape | None:
    """What the route's JSON body may hold."""
    field = route.body_field
    if field is None or isinstance(field.field_info, Form):
        return None
    annotation: Any = field.field_info.annotation
    if isinstance(annotation, type) and not field.field_info.metadata:
        return _shape(annotation)
    kind: Any = Annotated[annotation, field.field_info]  # with all that the annotation says
    return Shape.of(TypeAdapter(kind).json_schema())


@lru_cache(maxsize=128)
def _shape(model: type) -> Shape:
    """Most of what routes cost to make is the schema of their bodies, and a model may be the body of several routes."""
    return Shape.of(TypeAdapter(model).json_schema())


class _Admitted(BaseRoute):
    """Runs the route that the frame has let in, ``scope["route"]``: FastAPI does not look for another one."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return Match.FULL, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        route: APIRoute = scope["route"]
        await route.handle(scope, receive, send)


def application(config: Config, entries: Sequence[Entry]) -> FastAPI:
    """FastAPI with these routes and nothing of its own: it answers no errors, and no other path."""
    app = FastAPI(
        title="Ferrule",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
        exception_handlers={Exception: _raise, HTTPException: _raise, RequestValidationError: _raise},
    )
    routes = routes_of(entries)
    app.router.routes[:] = [_Admitted(), *routes]
    app.openapi = partial(_described, app, config, entries)  # type: ignore[method-assign]
    return app


def _described(app: FastAPI, config: Config, entries: Sequence[Entry]) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = describe(entries, config)
    return app.openapi_schema


async def _raise(request: Request, error: Exception) -> Any:
    """Every error is the frame's to answer."""
    raise error
