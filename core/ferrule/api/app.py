"""The HTTP application: FastAPI inside three ASGI layers that enforce what must not depend on a route.

The order is `Limits` → `CallerCheck` → `BodyReader` → FastAPI. `ferrule.interfaces.router` says what a route may rely
on.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ferrule.api.auth import Keys
from ferrule.api.body import BodyReader
from ferrule.api.budget import Budget
from ferrule.api.caller import CallerCheck
from ferrule.api.lifecycle import Lifecycle
from ferrule.api.limits import Limits
from ferrule.api.middleware import surround
from ferrule.api.reload import Reloads
from ferrule.api.routes import assemble
from ferrule.api_keys import BACKGROUND
from ferrule.config import Config, RouterSettings
from ferrule.hooks import HookRunner
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.router import ON_BEHALF, RouterContext
from ferrule.shared_memory.buffers import Buffers


def build_app(
    config: Config,
    plugins: Plugins,
    lifecycle: Lifecycle,
    hooks: HookRunner | None = None,
    reloads: Reloads | None = None,
) -> ASGIApp:
    """Build the application with the routes of the chosen router plugins. Raises StartupError, PluginError."""

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        token = BACKGROUND.set(True)
        try:
            await limits({ON_BEHALF: "", **scope}, receive, send)
        finally:
            BACKGROUND.reset(token)

    settings = RouterSettings.of(config, plugins)
    context = RouterContext(settings, plugins, lifecycle.service, lambda: lifecycle.load, inside)
    app, table = assemble(config, plugins, context)
    hooks = hooks or HookRunner()
    keys = Keys(config, lifecycle.board)
    budget = Budget(Buffers(lifecycle.board, config.limits.max_buffered_bytes), lambda: len(keys.callers) > 1)
    checked = CallerCheck(BodyReader(app, lifecycle), config, table, keys, hooks)
    limits = Limits(checked, config, lifecycle, table, budget)
    if reloads is not None:
        reloads.add("keys", keys.take)
        reloads.add("limits of bodies", limits.take)
    lifecycle.dialect = table.dialect_of
    return surround(limits, config.frontend, table.dialect_of)
