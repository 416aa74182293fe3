"""The levels of ``-O``, or of ``level`` in ``--compilation-config``: what all platforms understand by them."""

from __future__ import annotations

from ferrule.config import Resolved
from ferrule.errors import ConfigError

LEVELS = {0: "eager", 1: "graphs", 2: "graphs", 3: "compiled parts and graphs"}


def optimization_level(config: Resolved) -> int:
    """0 to 3, see LEVELS; 2 where nothing is said. Raises ConfigError."""
    given = config.device.compilation_config
    level = given.get("level", given.get("mode", 2))
    if type(level) is not int or level not in LEVELS:
        meant = ", ".join(f"{number} {name}" for number, name in LEVELS.items())
        raise ConfigError(f"--compilation-config: there is no level {level!r}.", f"Levels: {meant}.")
    return 0 if config.model.enforce_eager else level
