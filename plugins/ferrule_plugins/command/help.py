"""`ferrule help`: the commands, or the help of one of them."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.config.help import topic
from ferrule.errors import ConfigError, nearest
from ferrule.extras import missing
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins
from ferrule.launch.program import program_page


class HelpCommand(Command):
    summary = "Tell about a command."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """List the commands for `help`; print `COMMAND --help` for `help COMMAND`. Raises ConfigError for an unknown
        command.
        """
        words = [word for word in argv if topic([word]) is None]
        if not words:
            print(program_page(plugins))
            return 0
        name, *rest = words
        names = plugins.names("command")
        if name not in names:
            problem = missing("command", name) or f"There is no command {name!r}.{nearest(name, names)}"
            raise ConfigError(problem, f"Commands: {', '.join(names)}.")
        command: Command = plugins.make("command", name)
        return command.run([*rest, "--help"], plugins)
