"""Checks of the choice of tools, in any protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferrule.config import RouterSettings
from ferrule.errors import RequestError, nearest


def check_tool_choice(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None, config: RouterSettings
) -> None:
    """Check a choice, as `Generate.tool_choice` has it, against the functions and the server's options.

    Raises RequestError that names `tool_choice`.
    """
    if not tools:
        if choice not in (None, "none"):
            raise RequestError("tool_choice needs tools.", "tool_choice")
    elif choice in (None, "auto"):
        if not config.frontend.enable_auto_tool_choice:
            raise RequestError(
                'tool_choice "auto", the default with tools, needs a server that was started with '
                '--enable-auto-tool-choice and --tool-call-parser; with "none" the tools are only shown to the model.',
                "tool_choice",
            )
    elif isinstance(choice, dict):
        name, names = choice["function"]["name"], [tool["function"]["name"] for tool in tools]
        if name not in names:
            raise RequestError(
                f"tool_choice names {name!r:.80}, which is not one of the tools.{nearest(name, names)}", "tool_choice"
            )
