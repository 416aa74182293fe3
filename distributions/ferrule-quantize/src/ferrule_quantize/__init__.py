"""`ferrule quantize`: a float checkpoint's weights with fewer bits, in a folder that other programs read too."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.errors import ConfigError
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins
from ferrule_files.commands import CommandUsage, parse_command, prepared

_USAGE = "CommandUsage: ferrule quantize MODEL --to FORMAT -o FOLDER [options]"


class QuantizeCommand(Command):
    summary = "Write a float checkpoint with quantized weights, in a standard layout."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """Write the quantized checkpoint and return 0. Raises StartupError; nothing is changed then."""
        from ferrule_quantize import options

        usage = CommandUsage("ferrule quantize", self.summary, "model")
        parsed = parse_command(argv, usage, plugins, sections=options.sections(), server=False)
        if parsed is None:
            return 0
        config, asked = options.whole(parsed.config), parsed.extra["quantize"]
        for missing, name in ((config.model.model, "MODEL"), (asked.to, "--to"), (asked.output, "--output")):
            if not missing:
                raise ConfigError(f"{name} is missing.", _USAGE)
        with prepared(config, parsed.notices, plugins, "quantize") as (ready, chosen):
            from ferrule_quantize.run import quantize

            return quantize(asked, ready, chosen)
