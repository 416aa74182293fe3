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
