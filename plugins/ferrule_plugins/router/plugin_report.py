"""What there is to say about this server's plugins, for administrators and for the page at `/ui`."""

from __future__ import annotations

from typing import Any

from ferrule.errors import RequestFailed
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.router import RouterContext


def plugin_report(ctx: RouterContext) -> dict[str, Any]:
    """Return every plugin with its origin and state, and what is wrong with some. Raises RequestFailed where plugins
    were not discovered.
    """
    plugins = ctx.plugins
    if not isinstance(plugins, Plugins):
        raise RequestFailed("This server's plugins were not discovered: nothing is known of their origin.")
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
                "target": ref.target,
                "builtin": ref.builtin,
                "state": str(verdict.state),
                "reason": verdict.reason,
                "chosen": (ref.kind, ref.name) in ctx.config.chosen,
            }
        )
    refusals = [note for note in ctx.service.model.notes if " refused: " in note]
    problems = [*plugins.problems, *map(str, plugins.shadowed)]
    return {"object": "list", "data": rows, "refusals": refusals, "problems": problems}
