"""The HTTP application: FastAPI inside the `Edge`. `ferrule.interfaces.router` says what a route may rely on."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ferrule.api.budget import Budget
from ferrule.api.caller import CallerCheck
from ferrule.api.edge import Edge
from ferrule.api.lifecycle import Lifecycle
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
            await edge({ON_BEHALF: "", **scope}, receive, send)
        finally:
            BACKGROUND.reset(token)

    settings, board = RouterSettings.of(config, plugins), lifecycle.board
    folder = board.folder if config.frontend.api_server_count > 1 else None
    context = RouterContext(settings, plugins, lifecycle.service, lambda: lifecycle.load, folder, inside)
    app, table = assemble(config, plugins, context)
    callers = CallerCheck(config, hooks, lifecycle.board)
    budget = Budget(Buffers(lifecycle.board, config.limits.max_buffered_bytes), callers.keys)
    edge = Edge(app, config, lifecycle, table, callers, budget)
    if reloads is not None:
        reloads.add("keys", callers.take)
        reloads.add("limits of bodies", edge.take)
    lifecycle.dialect = table.dialect_of
    return surround(edge, config.frontend, table.dialect_of)
