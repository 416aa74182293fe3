"""`health`: probes, version, load and metrics; and explanations for paths that other servers have and this one has
not.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel

from ferrule import __version__
from ferrule.errors import UnavailableError
from ferrule.interfaces.router import Access, Router, RouterContext, needs
from ferrule_plugins.router.absent_routes import absent_routes

_RETRY = 5  # seconds


class State(BaseModel):
    status: str


class Version(BaseModel):
    version: str


class Load(BaseModel):
    server_load: int


class Health(Router):
    def router(self, ctx: RouterContext) -> APIRouter:
        service, front = ctx.service, ctx.config.frontend
        routes = APIRouter(tags=["health"])
        public = [needs(Access.PUBLIC)]

        @routes.get("/health", dependencies=public, summary="Ready for work? 503 with the state when not.")
        @routes.get("/ping", dependencies=public, summary="The same.")
        @routes.post("/ping", dependencies=public, summary="The same.")
        async def health() -> State:
            now = service.health()
            if now.state != "ready":
                raise UnavailableError(f"The server is {now.state}. {now.detail}".strip(), retry_after=_RETRY)
            return State(status=now.state)

        @routes.get("/version", dependencies=public, summary="The version.")
        async def version() -> Version:
            return Version(version=__version__)

        @routes.get("/load", summary="Requests in flight; 0 without --enable-server-load-tracking.")
        async def load() -> Load:
            return Load(server_load=ctx.load() if front.enable_server_load_tracking else 0)

        @routes.get(
            "/metrics",
            dependencies=public if front.public_metrics else [],
            summary="Figures for Prometheus.",
            response_class=PlainTextResponse,
        )
        async def metrics() -> Response:
            media_type, text = service.exposition()
            return Response(text, headers={"content-type": media_type})

        return routes

    def absent(self, ctx: RouterContext) -> Mapping[str, str]:
        return absent_routes(ctx)
