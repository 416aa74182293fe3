"""`ferrule pack`: a model's weights, quantized and laid out for the CPU's kernels, in a folder to be served."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.errors import ConfigError
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins
from ferrule_files.commands import CommandUsage, parse_command, prepared

_USAGE = "CommandUsage: ferrule pack MODEL [OUT] [-q METHOD] [--dtype TYPE] [options]"


class PackCommand(Command):
    summary = "Write a model's weights as the kernels, vLLM's workers or a load format read them."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """Write the folder. Returns 0. Raises StartupError; then there is no folder, or the former one."""
        from ferrule_plugins.command.pack import options

        usage = CommandUsage("ferrule pack", self.summary, "model")
        parsed = parse_command(_named(argv), usage, plugins, sections=options.sections(), server=False)
        if parsed is None:
            return 0
        config = options.whole(parsed.config)
        if not config.model.model:
            raise ConfigError("MODEL is missing.", _USAGE)
        with prepared(config, parsed.notices, plugins, "pack") as (ready, chosen):
            from ferrule_plugins.command.pack.run import pack

            return pack(parsed.extra["pack"], ready, chosen)


def _named(argv: Sequence[str]) -> list[str]:
    """Turn the second of two words in front of all options into --output."""
    words = list(argv)
    if len(words) > 1 and not any(word.startswith("-") for word in words[:2]):
        words[1:2] = ["--output", words[1]]
    return words
