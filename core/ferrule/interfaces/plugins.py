"""The set of plugins, as every part of the server and every plugin is given it: `names`, `origin`, `load` and `make`.

A plugin of other plugins (a sampler of logits processors, a command) makes what it needs with `make`, and logs their
faults with `log_fault`.

A plugin's class may have an attribute ``Options``, a dataclass or a `msgspec.Struct` with a field for each option. Its
constructor is then given an instance of that, ``options=``, with the values of `--plugin-config`.
"""

from ferrule.plugin.faults import log_fault
from ferrule.plugin.files import FileAdapter
from ferrule.plugin.plugin_set import Plugins

__all__ = ["FileAdapter", "Plugins", "log_fault"]
