"""The plugins that are installed, for whoever makes many models or instances of plugins."""

from __future__ import annotations

import sys
from functools import lru_cache

from ferrule.plugin import Plugins, discover


def installed_plugins() -> Plugins:
    """Return the installed plugins, discovered once, because a kit makes hundreds of instances."""
    return _installed(tuple(sys.path))


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> Plugins:
    return discover()
