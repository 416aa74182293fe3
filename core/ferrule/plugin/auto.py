"""Choosing among candidates when an option says `auto`: never silently."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from ferrule.errors import PluginError
from ferrule.extras import missing_beside
from ferrule.plugin.plugin_set import Plugins


class Chosen(Struct, frozen=True):
    """The name of a chosen plugin. `refusals` are (name, reason) of the candidates that came before, for the log."""

    name: str
    refusals: tuple[tuple[str, str], ...] = ()


def load_first(plugins: Plugins, kind: str, candidates: Iterable[str], refuses: Callable[[Any], str | None]) -> Chosen:
    """Load candidates in order until one can be used: `refuses(class)` gives None instead of a reason.

    A candidate that is broken, or whose own check raises, refuses. Raises PluginError that lists every refusal when
    none is left.
    """
    refusals: list[tuple[str, str]] = []
    for name in candidates:
        try:
            reason = refuses(plugins.load(kind, name))
        except PluginError as error:
            reason = error.message
        except Exception as error:
            reason = f"its own check failed: {type(error).__name__}: {error}"
        if reason is None:
            return Chosen(name, tuple(refusals))
        refusals.append((name, reason))
    lines = [f"{name} ({plugins.origin(kind, name)}): {reason}" for name, reason in refusals]
    listed = "\n".join(f"  {line}" for line in (*lines, *missing_beside(kind, plugins.names(kind))))
    raise PluginError(f"No {kind} plugin can be used here.", listed or f"None is installed: there is no {kind} to try.")
