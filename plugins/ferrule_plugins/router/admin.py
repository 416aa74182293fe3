"""`admin`: routes for development, absent unless FERRULE_SERVER_DEV_MODE=1."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.interfaces.router import Access, Call, Reply, Route, Router, RouterContext


class Admin(Router):
    def routes(self, ctx: RouterContext) -> Sequence[Route]:
        async def reset_prefix_cache(call: Call) -> Reply:
            return Reply({"reset": bool(await ctx.service.call("reset_prefix_cache"))})

        return [
            Route(
                method="POST",
                path="/reset_prefix_cache",
                handler=reset_prefix_cache,
                access=Access.ADMIN,
                summary="Forget cached prefixes; false when live requests hold some.",
                tags=("admin",),
            )
        ]
