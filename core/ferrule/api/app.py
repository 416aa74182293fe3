"""The HTTP application: FastAPI inside three ASGI layers that enforce what must not depend on a route.

The order is `Limits` → `CallerCheck` → `BodyReader` → FastAPI. `ferrule.interfaces.router` says what a route may rely
on.
"""

from __future__ import annotations

from starlette.types import ASGIApp

from ferrule.api.auth import Keys
from ferrule.api.body import BodyReader
from ferrule.api.budget import Budget
from ferrule.api.caller import CallerCheck
from ferrule.api.lifecycle import Lifecycle
from ferrule.api.limits import Limits
from ferrule.api.middleware import surround
from ferrule.api.reload import Reloads
from ferrule.api.routes import assemble
from ferrule.config import Config, RouterSettings
from ferrule.hooks import HookRunner
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.router import RouterContext
from ferrule.shared_memory.buffers import Buffers


def build_app(
    config: Config,
    plugins: Plugins,
    lifecycle: Lifecycle,
    hooks: HookRunner | None = None,
    reloads: Reloads | None = None,
) -> ASGIApp:
    """Build the application with the routes of the chosen router plugins. Raises StartupError, PluginError."""
    settings, board = RouterSettings.of(config, plugins), lifecycle.board
    folder = board.folder if config.frontend.api_server_count > 1 else None
    context = RouterContext(settings, plugins, lifecycle.service, lambda: lifecycle.load, folder)
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
