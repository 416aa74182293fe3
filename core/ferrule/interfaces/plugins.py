"""The set of plugins, as every part of the server and every plugin is given it: `names`, `origin`, `load` and `make`.

A plugin of other plugins (a sampler of logits processors, a command) makes what it needs with `make`.
"""

from ferrule.plugin.files import FileAdapter
from ferrule.plugin.plugin_set import Plugins

__all__ = ["FileAdapter", "Plugins"]
