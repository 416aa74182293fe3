"""What any part of the house may ask of the set of discovered plugins."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol


class Plugins(Protocol):
    """Frozen, picklable by msgspec, the same in every process. Implemented by `ferrule.plugin.PluginSet`."""

    def names(self, kind: str) -> tuple[str, ...]:
        """Names that can be chosen, built-ins first, broken ones included."""

    def load(self, kind: str, name: str) -> Any:
        """Import one plugin and return its class, checked against the kind's base class.

        Raises PluginError that names the distribution, its version and the cause, or the nearest name.
        """

    def origin(self, kind: str, name: str) -> str:
        """Distribution and version, for logs and errors."""


class FileAdapter(Protocol):
    """What a module has that makes plugins of files written for something else (--plugin-adapter)."""

    def names(self, kind: str, tree: ast.Module) -> Sequence[str]:
        """Names of the plugins that a file offers, from its syntax; none when it is no file for this adapter."""

    def prepare(self, module: ModuleType) -> None:
        """Called with the empty module before the file runs in it."""

    def adapt(self, kind: str, name: str, module: ModuleType) -> type:
        """The class of a plugin, from the module that has run. Raises PluginError."""
