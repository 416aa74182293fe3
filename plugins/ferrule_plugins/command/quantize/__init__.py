"""`ferrule quantize`: a float checkpoint's weights with fewer bits, in a folder that other programs read too."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.config.help import Usage
from ferrule.config.parse import parse_command
from ferrule.config.places import placed
from ferrule.errors import ConfigError
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins

_USAGE = "Usage: ferrule quantize MODEL --to FORMAT -o FOLDER [options]"


class QuantizeCommand(Command):
    summary = "Write a float checkpoint with quantized weights, in a standard layout."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """Returns 0 when the folder is complete. Raises StartupError; nothing is changed then."""
        from ferrule_plugins.command.quantize import options

        usage = Usage("ferrule quantize", self.summary, "model")
        parsed = parse_command(argv, usage, plugins, sections=options.sections(), server=False)
        if parsed is None:
            return 0
        config, asked = options.whole(parsed.config), parsed.extra["quantize"]
        for missing, name in ((config.model.model, "MODEL"), (asked.to, "--to"), (asked.output, "--output")):
            if not missing:
                raise ConfigError(f"{name} is missing.", _USAGE)
        from ferrule.launch.prepare import prepare
        from ferrule_plugins.command.quantize.run import quantize

        ready, chosen = prepare(config, parsed.notices, plugins, "quantize")
        with placed(config):
            return quantize(asked, ready, chosen)
