"""The FastAPI application with the routes of the chosen routers, and the table of what their paths offer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.params import Form
from fastapi.routing import APIRoute, APIRouter, iter_route_contexts
from starlette.exceptions import HTTPException

from ferrule import __version__
from ferrule.api.caller import PUBLIC, PUBLIC_METRICS
from ferrule.api.document import describe
from ferrule.api.errors import log_unexpected
from ferrule.api.intake import hand_decoded
from ferrule.api.paths import Entry, PathTable
from ferrule.api.respond import answer_error
from ferrule.config import Config
from ferrule.errors import FerruleError, NotFoundError, StartupError
from ferrule.interfaces.dialect import OPENAI, Dialect, Failure, encode
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.router import Access, RouterContext, needs_of
from ferrule.plugin import Component, check_plugins
from ferrule.plugin.faults import fault_logger, log_fault

_TRIAL = Failure(status=404, kind=NotFoundError.kind, message="This route does not exist.")  # to try a dialect with
_ANSWERED = (FerruleError, HTTPException, RequestValidationError, Exception)


def assemble(config: Config, plugins: Plugins, context: RouterContext) -> tuple[FastAPI, PathTable]:
    """Return the application, and the table of its paths. Raises StartupError, PluginError."""
    routers: list[APIRouter] = []
    entries: list[Entry] = []
    absent: dict[str, str] = {}
    dialects: dict[str, Dialect] = {}
    public = PUBLIC | (PUBLIC_METRICS if config.frontend.public_metrics else frozenset())
    check_plugins(plugins, (), Component.HTTP)
    found = [_asked(plugins, name, context) for name in plugins.chosen("router", config.frontend.routers)]
    for asked in sorted(found, key=_rank):
        routers.append(asked.router)
        entries += asked.entries
        absent |= asked.absent
        for path in asked.dialect.paths:
            if type(dialects.setdefault(path, asked.dialect)) is not type(asked.dialect):
                raise StartupError(f"Two routers have a dialect for {path}.", "Choose among them with --routers.")
    for entry in entries:
        if entry.access is Access.PUBLIC and ((entry.method, entry.path) not in public or entry.body is not None):
            raise StartupError(f"Route {entry.method} {entry.path} may not be public.")
    admin = config.env.server_dev_mode
    table = PathTable(entries, config.frontend.root_path, admin, absent, dialects)
    served = [entry for entry in entries if admin or entry.access is not Access.ADMIN]
    return application(config, routers, served), table


@dataclass(frozen=True)
class _Asked:
    """The answers of one router plugin: its routes, its advice on paths that are not served, and its dialect."""

    router: APIRouter
    entries: Sequence[Entry]
    absent: Mapping[str, str]
    dialect: Dialect


def _rank(asked: _Asked) -> tuple[bool, bool]:
    """Return a sort key that puts routers which generate first, and then those whose routes take a body.

    FastAPI tries routes one after the other.
    """
    entries = asked.entries
    return not any(entry.room for entry in entries), not any(entry.body is not None for entry in entries)


def _asked(plugins: Plugins, name: str, context: RouterContext) -> _Asked:
    plugin = plugins.make("router", name)
    faults = fault_logger(plugins, partial(log_fault, plugins.title("router", name)))
    with plugins.blamed("router", name):
        dialect = plugin.dialect(context)
        encode(dialect.error(_TRIAL))  # one that fails to do so stops the start
        router = plugin.router(context)
        entries = list(entries_of(router, faults, dialect))
        return _Asked(router, entries, plugin.absent(context), dialect)


def entries_of(
    router: APIRouter, faults: Callable[[str], None] = log_unexpected, dialect: Dialect = OPENAI
) -> Iterator[Entry]:
    """Yield a router's routes by method, with those of routers that it includes.

    `faults` logs what a handler raises.
    """
    for route in iter_route_contexts(router.routes):
        if not isinstance(route.original_route, APIRoute):
            kind = type(route.original_route).__name__
            raise StartupError(f"{route.path}: a router may have path operations (`@router.get` …) only, not a {kind}.")
        field, needed = route.body_field, needs_of(route)
        body = None if field is None or isinstance(field.field_info, Form) else field.field_info.annotation
        for method in sorted(route.methods or ()):
            found = (route, route.path or "", method, needed.access, body, faults, needed.room, dialect)
            yield Entry(*found, needed.max_body_bytes)


def application(config: Config, routers: Sequence[APIRouter], served: Sequence[Entry]) -> FastAPI:
    """Return a FastAPI application with these routers; its document describes those entries that are `served`."""
    app = FastAPI(
        title="Ferrule",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,  # a body without a Content-Type is JSON
        exception_handlers=dict.fromkeys(_ANSWERED, answer_error),
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )
    for router in routers:
        hand_decoded(router)
        app.include_router(router)
    app.openapi = partial(_described, app, config, served)  # type: ignore[method-assign]
    return app


def _described(app: FastAPI, config: Config, served: Sequence[Entry]) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = describe(app, served, config)
    return app.openapi_schema
