"""`health`: probes, version and metrics."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule import __version__
from ferrule.errors import UnavailableError
from ferrule.interfaces.router import Access, Call, Reply, Route, Router, RouterContext

_RETRY = 5  # seconds


class Health(Router):
    def routes(self, ctx: RouterContext) -> Sequence[Route]:
        service = ctx.service

        async def health(call: Call) -> Reply:
            now = service.health()
            if now.state != "ready":
                raise UnavailableError(f"The server is {now.state}. {now.detail}".strip(), retry_after=_RETRY)
            return Reply({"status": now.state})

        async def version(call: Call) -> Reply:
            return Reply({"version": __version__})

        async def metrics(call: Call) -> Reply:
            media_type, text = service.exposition()
            return Reply(text, media_type=media_type)

        public = Access.PUBLIC
        tags = ("health",)
        return [
            Route(method="GET", path="/health", handler=health, access=public, summary="Ready for work?", tags=tags),
            Route(method="GET", path="/ping", handler=health, access=public, summary="The same.", tags=tags),
            Route(method="POST", path="/ping", handler=health, access=public, summary="The same.", tags=tags),
            Route(method="GET", path="/version", handler=version, access=public, summary="The version.", tags=tags),
            Route(method="GET", path="/metrics", handler=metrics, summary="Figures for Prometheus.", tags=tags),
        ]
