"""Checking the plugins that are chosen, before anything that takes long: a wrong one must not be found by a request.

`Kind.used_in` says which component uses a kind. Engine, frontend and HTTP edge check theirs first: import, base class,
signatures, options; the engine those of the device and the model only where its executor runs one
(`Executor.runs_model`). The processes start at the same time, and the first that fails stops all. A dry run checks the
third-party plugins of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ferrule.plugin.kinds import KINDS, Component
from ferrule.plugin.plugin_set import Plugins


def check_plugins(
    plugins: Plugins, chosen: Iterable[tuple[str, str]], *components: Component
) -> dict[tuple[str, str], Callable[..., Any]]:
    """Import those of `chosen`, (kind, name), that these components use, and those that have options; read the options.

    Returns what makes each. Raises PluginError, and ConfigError for options. See `Plugins.factory`.
    """
    configured = [(kind, name) for kind, _, name in (id.partition(":") for id in plugins.options)]
    wanted = [
        (kind, name)
        for kind, name in dict.fromkeys([*chosen, *configured])
        if kind in KINDS and KINDS[kind].used_in in components
    ]
    return {(kind, name): plugins.factory(kind, name) for kind, name in wanted}
