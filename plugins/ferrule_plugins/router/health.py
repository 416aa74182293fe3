"""`health`: probes, version, load and metrics; and what to say of paths that others serve and this server does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ferrule import __version__
from ferrule.errors import UnavailableError
from ferrule.interfaces.router import Access, Call, Reply, Route, Router, RouterContext
from ferrule_plugins.router.elsewhere import elsewhere

_RETRY = 5  # seconds


class Health(Router):
    def routes(self, ctx: RouterContext) -> Sequence[Route]:
        service = ctx.service
        tracked = ctx.config.frontend.enable_server_load_tracking

        async def health(call: Call) -> Reply:
            now = service.health()
            if now.state != "ready":
                raise UnavailableError(f"The server is {now.state}. {now.detail}".strip(), retry_after=_RETRY)
            return Reply({"status": now.state})

        async def version(call: Call) -> Reply:
            return Reply({"version": __version__})

        async def load(call: Call) -> Reply:
            return Reply({"server_load": ctx.load() if tracked else 0})

        async def metrics(call: Call) -> Reply:
            media_type, text = service.exposition()
            return Reply(text, media_type=media_type)

        public, state = Access.PUBLIC, dict[str, str]
        tags = ("health",)
        return [
            Route(method=method, path=path, handler=health, access=public, answer=state, summary=summary, tags=tags)
            for method, path, summary in (
                ("GET", "/health", "Ready for work? 503 with the state when not."),
                ("GET", "/ping", "The same."),
                ("POST", "/ping", "The same."),
            )
        ] + [
            Route(
                method="GET",
                path="/version",
                handler=version,
                access=public,
                answer=state,
                summary="The version.",
                tags=tags,
            ),
            Route(
                method="GET",
                path="/load",
                handler=load,
                answer=dict[str, int],
                summary="Requests in flight; 0 without --enable-server-load-tracking.",
                tags=tags,
            ),
            Route(
                method="GET", path="/metrics", handler=metrics, answer=str, summary="Figures for Prometheus.", tags=tags
            ),
        ]

    def absent(self, ctx: RouterContext) -> Mapping[str, str]:
        return elsewhere(ctx)
