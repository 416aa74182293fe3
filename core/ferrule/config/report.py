"""What a server runs with: the values of all options, fit to be told."""

from __future__ import annotations

from typing import Any

import msgspec

from ferrule.config.parse import config_schema
from ferrule.config.sections import Config

_HIDDEN = "(hidden)"


def shown(config: Config) -> dict[str, Any]:
    """Return the options of the resolved configuration by name, without the values of secrets."""
    found = {}
    for spec in config_schema().specs:
        section = getattr(config, spec.section, None)
        if section is not None and hasattr(section, spec.name):
            value = getattr(section, spec.name)
            found[spec.name] = _HIDDEN if spec.option.secret and value else msgspec.to_builtins(value)
    return found


def origins(config: Config) -> dict[str, str]:
    """Return where each option's value comes from: its origin as in `Config.origins`, "default", or "resolved" for one
    that was filled at the start.
    """
    before = defaults()
    return {
        name: config.origins.get(name) or ("default" if value == before[name] else "resolved")
        for name, value in shown(config).items()
    }


def defaults() -> dict[str, Any]:
    """Return the default of each option by name, before it is resolved."""
    return {spec.name: msgspec.to_builtins(spec.default) for spec in config_schema().specs}
