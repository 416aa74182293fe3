"""`docs`: an OpenAPI description derived from the routes, and a page that needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec

from ferrule import __version__
from ferrule.interfaces.router import Access, Call, Reply, Route, Router, RouterContext

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
_STYLE = "body{font:16px/1.5 sans-serif;max-width:50em;margin:2em auto;padding:0 1em}td{padding:.2em 1em .2em 0}"


class Docs(Router):
    def routes(self, ctx: RouterContext) -> Sequence[Route]:
        if ctx.config.frontend.disable_fastapi_docs:
            return []

        async def openapi(call: Call) -> Reply:
            return Reply({**describe(ctx.all_routes()), "servers": [{"url": ctx.config.frontend.root_path or "/"}]})

        async def page(call: Call) -> Reply:
            return Reply(render(ctx.all_routes()), media_type="text/html; charset=utf-8")

        tags = ("docs",)
        return [
            Route(method="GET", path="/openapi.json", handler=openapi, summary="This API, described.", tags=tags),
            Route(method="GET", path="/docs", handler=page, summary="The routes, to read.", tags=tags),
            Route(method="GET", path="/redoc", handler=page, summary="The same page.", tags=tags),
        ]


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    types = [route.body_type for route in routes if route.body_type is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        operation = paths.setdefault(path, {})[route.method.lower()] = _operation(route)
        if route.body_type is not None:
            content = {"application/json": {"schema": schema_of[route.body_type]}}
            operation["requestBody"] = {"required": True, "content": content}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ferrule", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    failure = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "tags": list(route.tags),
        "responses": {"200": {"description": "Success."}, "default": {"description": "An error.", **failure}},
    }
    names = [part[1:-1].removesuffix(":path") for part in route.path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.access is not Access.PUBLIC:
        operation["security"] = [{"key": []}]
    return operation


def render(routes: Sequence[Route]) -> str:
    """The routes as one page, without scripts or assets."""
    rows = "\n".join(
        f"<tr><td>{escape(route.method)}</td><td><code>{escape(route.path)}</code></td><td>{escape(route.summary)}</td></tr>"
        for route in routes
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Ferrule</title><style>{_STYLE}</style>"
        f"<h1>Ferrule {escape(__version__)}</h1><p>The full description is <a href=openapi.json>openapi.json</a>.</p>"
        f"<table>{rows}</table></html>\n"
    )
