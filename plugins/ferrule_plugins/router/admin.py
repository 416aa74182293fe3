"""`admin`: routes for development, absent unless FERRULE_SERVER_DEV_MODE=1."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from ferrule import __version__, env
from ferrule.config import Config
from ferrule.config.parse import config_sections
from ferrule.config.schema import Schema
from ferrule.errors import RequestError, TooSlowError, nearest
from ferrule.interfaces.router import Access, Call, Reply, Route, Router, RouterContext
from ferrule.interfaces.service import Service

Answers = Callable[[Service, Call], Awaitable[Any]]  # what a handler makes of a call: the JSON content of a 200
_HIDDEN = "(hidden)"
_TAGS = ("admin",)


class CollectiveRpc(msgspec.Struct, kw_only=True):
    """A call of a method of --worker-extension-cls on every worker. `timeout` is in seconds."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class Admin(Router):
    def routes(self, ctx: RouterContext) -> Sequence[Route]:
        return [
            _route(ctx, "POST", "/reset_prefix_cache", _reset, "Forget cached prefixes; false while some are in use."),
            _route(
                ctx,
                "POST",
                "/sleep",
                _sleep,
                "Give back the memory of weights and cache; requests wait until the server wakes up.",
                query={"level": "1 (default) or 2: with 2 no copy of the weights is kept anywhere."},
            ),
            _route(
                ctx,
                "POST",
                "/wake_up",
                _wake_up,
                "Restore what /sleep gave back.",
                query={"tags": "weights or kv_cache, repeatable: only this. Default: all."},
            ),
            _route(ctx, "GET", "/is_sleeping", _is_sleeping, "Whether a part of the model's memory is given back."),
            _route(ctx, "POST", "/start_profile", _start_profile, "Record what the model computes."),
            _route(ctx, "POST", "/stop_profile", _stop_profile, "Write the trace; its name in the folder for traces."),
            _route(
                ctx,
                "POST",
                "/collective_rpc",
                _collective_rpc,
                "Call a method of --worker-extension-cls on every worker.",
                body_type=CollectiveRpc,
            ),
            _route(
                ctx,
                "GET",
                "/server_info",
                _Info(ctx),
                "What runs here, and how it is configured; secrets are hidden.",
                query={"config_format": "How vllm_config is written: text (default) or json."},
            ),
            _route(ctx, "GET", "/v1/plugins", _Plugins(ctx), "Plugins with their origin, and why some are not used."),
        ]

    def absent(self, ctx: RouterContext) -> Mapping[str, str]:
        if ctx.config.env.server_dev_mode:
            return {}
        hint = f"It is for development: the server must be started with {env.variable('server_dev_mode')}=1."
        return {route.path: hint for route in self.routes(ctx)}


def _route(ctx: RouterContext, method: str, path: str, answers: Answers, summary: str, **more: Any) -> Route:
    """An admin route. Query parameters that it does not name are refused."""
    known: Mapping[str, str] = more.get("query", {})

    async def handle(call: Call) -> Reply:
        for name in call.query:
            if name not in known:
                listed = ", ".join(known) or "none"
                raise RequestError(f"Unknown query parameter; {path} takes {listed}.{nearest(name, known)}", "query")
        return Reply(await answers(ctx.service, call))

    return Route(
        method=method,
        path=path,
        handler=handle,
        access=Access.ADMIN,
        answer=dict[str, Any],
        summary=summary,
        tags=_TAGS,
        **more,
    )


async def _reset(service: Service, call: Call) -> Any:
    return {"reset": bool(await service.call("reset_prefix_cache"))}


async def _sleep(service: Service, call: Call) -> Any:
    level = call.query.get("level", "1")
    if level not in ("1", "2"):
        raise RequestError("level must be 1 or 2.", "level")
    await service.call("sleep", int(level))
    return await _is_sleeping(service, call)


async def _wake_up(service: Service, call: Call) -> Any:
    await service.call("wake_up", call.query["tags"].split(",") if "tags" in call.query else None)
    return await _is_sleeping(service, call)


async def _is_sleeping(service: Service, call: Call) -> Any:
    return {"is_sleeping": bool(await service.call("is_sleeping"))}


async def _start_profile(service: Service, call: Call) -> Any:
    await service.call("start_profile")
    return {"recording": True}


async def _stop_profile(service: Service, call: Call) -> Any:
    return {"recording": False, "file": await service.call("stop_profile")}


async def _collective_rpc(service: Service, call: Call) -> Any:
    body: CollectiveRpc = call.body
    if body.timeout is not None and not 0 < body.timeout <= 86_400:
        raise RequestError("timeout must be a number of seconds above 0, at most a day.", "timeout")
    try:
        async with asyncio.timeout(body.timeout):
            return {"results": await service.call("collective_rpc", body.method, body.args, body.kwargs)}
    except TimeoutError:
        raise TooSlowError(f"The call has not ended after {body.timeout:g} s; it goes on.", "timeout") from None


class _Info:
    def __init__(self, ctx: RouterContext) -> None:
        self._ctx = ctx

    async def __call__(self, service: Service, call: Call) -> Any:
        form = call.query.get("config_format", "text")
        if form not in ("text", "json"):
            raise RequestError("config_format must be text or json.", "config_format")
        options = shown(self._ctx.config)
        plugins = self._ctx.plugins
        kinds = sorted({ref.kind for ref in plugins.refs})
        return {
            "version": __version__,
            "model": msgspec.to_builtins(service.model),
            "served_names": list(service.names),
            "environment": env.report(),
            "plugins": {kind: list(plugins.names(kind)) for kind in kinds},
            "vllm_config": options if form == "json" else ", ".join(f"{k}={v!r}" for k, v in options.items()),
        }


class _Plugins:
    def __init__(self, ctx: RouterContext) -> None:
        self._ctx = ctx

    async def __call__(self, service: Service, call: Call) -> Any:
        plugins = self._ctx.plugins
        rows = []
        for ref in plugins.refs:
            verdict = plugins.verdict(ref)
            rows.append(
                {
                    "id": ref.id,
                    "object": "plugin",
                    "kind": ref.kind,
                    "name": ref.name,
                    "origin": ref.source,
                    "builtin": ref.builtin,
                    "state": str(verdict.state),
                    "reason": verdict.reason,
                }
            )
        refusals = [note for note in service.model.notes if " refused: " in note]
        problems = [*plugins.problems, *map(str, plugins.shadowed)]
        return {"object": "list", "data": rows, "refusals": refusals, "problems": problems}


def shown(config: Config) -> dict[str, Any]:
    """The options of the resolved configuration by name, without the values of secrets."""
    found = {}
    for spec in Schema(config_sections()).specs:
        section = getattr(config, spec.section, None)
        if section is not None and hasattr(section, spec.name):
            value = getattr(section, spec.name)
            found[spec.name] = _HIDDEN if spec.option.secret and value else msgspec.to_builtins(value)
    return found
