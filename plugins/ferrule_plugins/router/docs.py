"""`docs`: an OpenAPI description derived from the routes, and pages that need nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.interfaces.router import Call, Reply, Route, Router, RouterContext
from ferrule_plugins.router.docs_openapi import describe
from ferrule_plugins.router.docs_page import render

# The pages' own style and script, calls to this server, and nothing else.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Docs(Router):
    def routes(self, ctx: RouterContext) -> Sequence[Route]:
        if ctx.config.frontend.disable_fastapi_docs:
            return []

        async def openapi(call: Call) -> Reply:
            return Reply(describe(ctx.all_routes(), ctx.config))

        async def console(call: Call) -> Reply:
            return _page(render(describe(ctx.all_routes(), ctx.config), console=True))

        async def reading(call: Call) -> Reply:
            return _page(render(describe(ctx.all_routes(), ctx.config), console=False))

        tags = ("docs",)
        return [
            Route(
                method="GET",
                path="/openapi.json",
                handler=openapi,
                answer=dict,
                summary="This API, described.",
                tags=tags,
            ),
            Route(method="GET", path="/docs", handler=console, answer=bytes, summary="The routes, to try.", tags=tags),
            Route(
                method="GET", path="/redoc", handler=reading, answer=bytes, summary="The routes, to read.", tags=tags
            ),
        ]


def _page(text: str) -> Reply:
    headers = {"content-security-policy": _POLICY, "referrer-policy": "no-referrer", "cache-control": "no-cache"}
    return Reply(text, media_type="text/html; charset=utf-8", headers=headers)
