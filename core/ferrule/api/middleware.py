"""ASGI middleware around the whole application: CORS, and the operator's own. All of it runs before any check of a
key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ferrule.api.errors import failure_of
from ferrule.api.paths import raw_path
from ferrule.config import FrontendConfig
from ferrule.errors import ConfigError, RequestError
from ferrule.interfaces.dialect import OPENAI, Dialect
from ferrule.interfaces.router import JSON

_READABLE = ("x-request-id", "request-id", "x-ferrule-ignored-fields", "retry-after")  # by scripts of other origins


def surround(app: ASGIApp, front: FrontendConfig, dialect: Callable[[bytes], Dialect]) -> ASGIApp:
    """Wrap the application in CORS and `--middleware`, of which the last is the outermost. Raises ConfigError.

    `dialect` returns the dialect of a path.
    """
    if front.allowed_origins:
        allowed = front.allowed_origins, front.allowed_methods, front.allowed_headers, front.allow_credentials
        app = _Cors(app, *allowed, expose_headers=_READABLE)
    for name in front.middleware:
        app = _applied(name, app)
    return ServerErrorMiddleware(app, partial(_failed, dialect)) if front.middleware else app


class _Cors(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a preflight request. A refusal is always an OpenAI error, because scripts cannot read it."""
        found = super().preflight_response(request_headers)
        if found.status_code == 200:
            return found
        del found.headers["content-length"], found.headers["content-type"]
        text = f"{bytes(found.body).decode()}: see --allowed-origins, --allowed-methods and --allowed-headers."
        return JSON(OPENAI.error(failure_of(RequestError(text))), 400, dict(found.headers))


def _applied(name: str, app: ASGIApp) -> ASGIApp:
    """Import a middleware by name and wrap the application in it. Raises ConfigError.

    A class is ASGI middleware; a coroutine function(request, call_next) is called for each request.
    """
    try:
        module, _, attribute = name.rpartition(".")
        found: Callable[..., Any] = getattr(import_module(module), attribute)
        is_class = inspect.isclass(found)
        made = found(app) if is_class else None
    except Exception as error:
        what = f"--middleware {name} cannot be loaded: {type(error).__name__}: {error}"
        raise ConfigError(what, "It is written module.name; the module must be importable (PYTHONPATH).") from error
    if inspect.iscoroutinefunction(found):
        return BaseHTTPMiddleware(app, found)
    if not callable(made):
        kind = type(made or found).__name__
        raise ConfigError(f"--middleware {name} is a {kind}, no ASGI class or async function(request, call_next).")
    return made  # type: ignore[no-any-return]


async def _failed(dialect: Callable[[bytes], Dialect], request: Request, error: Exception) -> Response:
    """Return the answer to send when a middleware raises before it has answered."""
    failure = failure_of(error)
    body = dialect(raw_path(request.scope)).error(failure)
    return JSON(body, failure.status, dict(failure.headers))
