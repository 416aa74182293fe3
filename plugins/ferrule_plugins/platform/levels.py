"""The levels of ``-O``, or of ``level`` in ``--compilation-config``: their meaning on all platforms."""

from __future__ import annotations

from ferrule.config import DeviceSettings


def optimization_level(config: DeviceSettings) -> int:
    """Return the level: 0 eager, 1 and 2 graphs (2 by default), 3 compiled parts and graphs.

    `resolve` refuses others.
    """
    given = config.device.compilation_config
    level: int = given.get("level", given.get("mode", 2))
    return 0 if config.enforce_eager else level
