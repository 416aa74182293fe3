"""What any part of the house may ask of the set of discovered plugins."""

from __future__ import annotations

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
