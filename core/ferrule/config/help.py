"""What a command says about itself, and how it is asked for help. The pages are made by the plugin `command:help`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ferrule.config.schema import Schema
from ferrule.errors import PluginError


@dataclass(frozen=True)
class Usage:
    """How a command is called. `positional` is the option that an argument without a dash stands for."""

    command: str  # "ferrule serve"
    summary: str
    positional: str | None = None


class PluginNames(Protocol):
    """The part of the plugin set that help needs."""

    def names(self, kind: str) -> tuple[str, ...]: ...

    def origin(self, kind: str, name: str) -> str: ...

    def load(self, kind: str, name: str) -> Any: ...


def topic(argv: Sequence[str]) -> str | None:
    """What help is asked for: "" for a plain --help, None for no help."""
    for word in argv:
        if word == "--":
            return None
        if word in {"-h", "--help"}:
            return ""
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def load_help(plugins: PluginNames) -> Any:
    """The plugin `command:help`. Raises PluginError, in one line, when it cannot be used."""
    try:
        return plugins.load("command", "help")()
    except PluginError as error:
        raise PluginError(f"Help comes from the plugin command:help. {error.message}") from error


def page(schema: Schema, usage: Usage, topic: str, plugins: PluginNames) -> str:
    """The help text of a command. Raises PluginError."""
    return str(load_help(plugins).page(schema, usage, topic, plugins))
