"""``ferrule example KIND``: who offers plugins of a kind."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.errors import ConfigError
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins


class ExampleCommand(Command):
    summary = "say who offers plugins of a kind"  # `ferrule --help` reads it from the source, without an import

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        if any(word in {"-h", "--help"} for word in argv):
            print(f"usage: ferrule example KIND\n\n{self.summary}")
            return 0
        if len(argv) != 1 or not plugins.names(argv[0]):
            raise ConfigError(f"ferrule example takes one kind of plugin, not {' '.join(argv)!r}.")
        for name in plugins.names(argv[0]):
            print(f"{name}: {plugins.origin(argv[0], name)}")
        return 0
