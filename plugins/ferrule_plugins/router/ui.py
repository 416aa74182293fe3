"""`ui`: the page at `/ui`, which is plain files, and the routes with the figures that it shows.

The page and its files hold nothing of this server, so they need no key (`ferrule.api.auth.PUBLIC`); every figure does.
A person types the key once in each tab: it stays in the tab's `sessionStorage`, which a reload survives and the tab's
end does not, and goes nowhere but into the header `Authorization` of calls to this server.

The content security policy has no exception: no inline script or style, nothing from another host. What a model writes
becomes text nodes and elements that the page makes itself, and Trusted Types forbid it to parse HTML at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from ferrule import __version__
from ferrule.errors import NotFoundError
from ferrule.interfaces.router import JSON, Access, Router, RouterContext, needs
from ferrule.interfaces.service import Service
from ferrule_plugins.router.plugin_report import plugin_report

_PAGE = "index.html"
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_SECONDS = 1.0  # a picture of the engine is taken no more often than this, however many pages are open


class Page(Router):
    def router(self, ctx: RouterContext) -> APIRouter:
        routes = APIRouter(tags=["ui"])
        if ctx.config.frontend.disable_ui:
            return routes
        public = [needs(Access.PUBLIC)]
        picture = _Picture(ctx.service)

        @routes.get("/ui", dependencies=public, summary="A page to use this server.", response_class=HTMLResponse)
        async def page() -> Response:
            return _answer(_PAGE)

        @routes.get("/ui/{file}", dependencies=public, summary="A file of the page.", include_in_schema=False)
        async def file(file: str) -> Response:
            return _answer(file)

        @routes.get("/ui/api/plugins", summary="Plugins with their origin, and why some are not used.")
        async def plugins() -> dict[str, Any]:
            return plugin_report(ctx)

        @routes.get("/ui/api/options", summary="The options of this server and their sources; secrets are hidden.")
        async def options() -> dict[str, Any]:
            return {"version": __version__, "options": _options(ctx)}

        @routes.get("/ui/api/live", summary="What the engine does now: its requests, cache and last steps, as numbers.")
        async def live() -> JSON:
            return JSON(await picture.get())

        return routes

    def absent(self, ctx: RouterContext) -> Mapping[str, str]:
        return {"/ui/": "The page is switched off: --disable-ui."} if ctx.config.frontend.disable_ui else {}


class _Picture:
    """The newest picture of the engine, which all open pages of an API process share."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._taken = -_SECONDS
        self._found: Any = None

    async def get(self) -> Any:
        async with self._lock:
            if time.monotonic() - self._taken >= _SECONDS:
                self._found = await self._service.call("live")
                self._taken = time.monotonic()
            return self._found


def _options(ctx: RouterContext) -> list[dict[str, Any]]:
    config = ctx.config
    return [
        {"name": name, "value": value, "default": config.defaults[name], "source": config.origins[name]}
        for name, value in config.options.items()
    ]


def _answer(name: str) -> Response:
    if name not in _contents():
        raise NotFoundError("There is no such file.")
    return Response(_contents()[name], media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)


@cache
def _contents() -> dict[str, bytes]:
    """Return the files of the page by name."""
    folder = files(__package__) / "static" / "ui"
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in _TYPES}
