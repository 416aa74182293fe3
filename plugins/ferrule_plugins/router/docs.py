"""`docs`: the OpenAPI document, and FastAPI's two pages for it with scripts that this server sends itself."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, Response

from ferrule.errors import NotFoundError
from ferrule.interfaces.router import Router, RouterContext

_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "redoc.standalone.js": "text/javascript",
}
_ICON = "data:,"  # none: the browser asks for no /favicon.ico
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


class Docs(Router):
    def router(self, ctx: RouterContext) -> APIRouter:
        routes = APIRouter(tags=["docs"])
        if ctx.config.frontend.disable_fastapi_docs:
            return routes

        @routes.get("/openapi.json", summary="This API, described.", response_class=JSONResponse)
        async def openapi(request: Request) -> Response:
            return JSONResponse(request.app.openapi())

        @routes.get("/docs", summary="The routes, to try.", response_class=HTMLResponse)
        async def swagger() -> Response:
            return _page(
                get_swagger_ui_html(
                    openapi_url="openapi.json",
                    title="Ferrule",
                    swagger_js_url="docs/swagger-ui-bundle.js",
                    swagger_css_url="docs/swagger-ui.css",
                    swagger_favicon_url=_ICON,
                )
            )

        @routes.get("/redoc", summary="The routes, to read.", response_class=HTMLResponse)
        async def redoc() -> Response:
            return _page(
                get_redoc_html(
                    openapi_url="openapi.json",
                    title="Ferrule",
                    redoc_js_url="docs/redoc.standalone.js",
                    redoc_favicon_url=_ICON,
                    with_google_fonts=False,
                )
            )

        @routes.get("/docs/{asset}", summary="A script or style of these pages.", include_in_schema=False)
        async def asset(asset: str) -> Response:
            if asset not in _ASSETS:
                raise NotFoundError("There is no such file.")
            return Response(_read(asset), media_type=_ASSETS[asset], headers={"cache-control": "max-age=86400"})

        return routes


@cache
def _read(name: str) -> bytes:
    return (files(__package__) / "static" / name).read_bytes()


def _page(page: HTMLResponse) -> Response:
    """Return the page with a content security policy that allows its own script, and files and calls of this server
    only.

    Styles may be inline: both pages generate theirs as they run.
    """
    scripts = [hashlib.sha256(text).digest() for text in map(str.encode, _SCRIPT.findall(bytes(page.body).decode()))]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in scripts)
    page.headers["content-security-policy"] = (
        f"default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self' {allowed}; connect-src 'self'; "
        "img-src 'self' data:; worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    page.headers["referrer-policy"] = "no-referrer"
    page.headers["cache-control"] = "no-cache"
    return page
