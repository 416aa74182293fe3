"""`ferrule version`."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule import __version__
from ferrule.config.help import CommandUsage
from ferrule.config.parse import parse_command
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins


class Version(Command):
    summary = "Print the version."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        if parse_command(argv, CommandUsage("ferrule version", self.summary), plugins, sections={}) is not None:
            print(f"ferrule {__version__}")
        return 0
