"""`admin`: routes for development, absent unless FERRULE_SERVER_DEV_MODE=1."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.routing import APIRoute
from pydantic import Field

from ferrule import __version__, env
from ferrule.errors import RequestError, TooSlowError, nearest
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.router import Access, Router, RouterContext, needs
from ferrule.schema import Body, Number
from ferrule_plugins.router.plugin_report import plugin_report

_LEVEL = "1 (default) or 2: with 2 no copy of the weights is kept anywhere."
_TAGS = "weights or kv_cache, repeatable: only this. Default: all."
_FORMAT = "How vllm_config is written: text (default) or json."


class CollectiveRpc(Body):
    """A call of a method of --worker-extension-cls on every worker."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Number | None = Field(None, gt=0, le=86_400, description="Seconds.")


class Admin(Router):
    def router(self, ctx: RouterContext) -> APIRouter:
        service = ctx.service
        routes = APIRouter(tags=["admin"], dependencies=[needs(Access.ADMIN), Depends(_only_named)])

        @routes.post("/reset_prefix_cache", summary="Forget cached prefixes; false while some are in use.")
        async def reset() -> dict[str, Any]:
            return {"reset": bool(await service.call("reset_prefix_cache"))}

        @routes.get("/is_sleeping", summary="Whether a part of the model's memory is given back.")
        async def is_sleeping() -> dict[str, Any]:
            return {"is_sleeping": bool(await service.call("is_sleeping"))}

        @routes.post(
            "/sleep", summary="Give back the memory of weights and cache; requests wait until the server wakes up."
        )
        async def sleep(level: Annotated[str, Query(description=_LEVEL)] = "1") -> dict[str, Any]:
            if level not in ("1", "2"):
                raise RequestError("level must be 1 or 2.", "level")
            await service.call("sleep", int(level))
            return await is_sleeping()

        @routes.post("/wake_up", summary="Restore what /sleep gave back.")
        async def wake_up(tags: Annotated[list[str] | None, Query(description=_TAGS)] = None) -> dict[str, Any]:
            await service.call("wake_up", ",".join(tags).split(",") if tags else None)
            return await is_sleeping()

        @routes.post("/start_profile", summary="Record what the model computes.")
        async def start_profile() -> dict[str, Any]:
            await service.call("start_profile")
            return {"recording": True}

        @routes.post("/stop_profile", summary="Write the trace; its name in the folder for traces.")
        async def stop_profile() -> dict[str, Any]:
            return {"recording": False, "file": await service.call("stop_profile")}

        @routes.post("/collective_rpc", summary="Call a method of --worker-extension-cls on every worker.")
        async def collective_rpc(body: CollectiveRpc) -> dict[str, Any]:
            try:
                async with asyncio.timeout(body.timeout):
                    return {"results": await service.call("collective_rpc", body.method, body.args, body.kwargs)}
            except TimeoutError:
                raise TooSlowError(f"The call has not ended after {body.timeout:g} s; it goes on.", "timeout") from None

        @routes.get("/server_info", summary="What runs here, and how it is configured; secrets are hidden.")
        async def server_info(config_format: Annotated[str, Query(description=_FORMAT)] = "text") -> dict[str, Any]:
            if config_format not in ("text", "json"):
                raise RequestError("config_format must be text or json.", "config_format")
            return _info(ctx, config_format == "json")

        @routes.get("/v1/plugins", summary="Plugins with their origin, and why some are not used.")
        async def plugins() -> dict[str, Any]:
            return plugin_report(ctx)

        return routes

    def absent(self, ctx: RouterContext) -> Mapping[str, str]:
        if ctx.config.server_dev_mode:
            return {}
        hint = f"It is for development: the server must be started with {env.variable('server_dev_mode')}=1."
        return {route.path: hint for route in self.router(ctx).routes if isinstance(route, APIRoute)}


async def _only_named(request: Request) -> None:
    """Refuse query parameters that the route does not have: a misspelt one would have no effect without a word about
    it.
    """
    route: APIRoute = request.scope["route"]
    known = [param.alias for param in route.dependant.query_params]
    for name in request.query_params:
        if name not in known:
            listed = ", ".join(known) or "none"
            text = f"Unknown query parameter; {route.path} takes {listed}.{nearest(name, known)}"
            raise RequestError(text, "query")


def _info(ctx: RouterContext, as_json: bool) -> dict[str, Any]:
    options = ctx.config.options
    service, plugins = ctx.service, ctx.plugins
    kinds = sorted({ref.kind for ref in plugins.refs}) if isinstance(plugins, Plugins) else []
    return {
        "version": __version__,
        "model": msgspec.to_builtins(service.model),
        "served_names": list(service.names),
        "environment": env.report(),
        "plugins": {kind: list(plugins.names(kind)) for kind in kinds},
        "vllm_config": options if as_json else ", ".join(f"{k}={v!r}" for k, v in options.items()),
    }
