"""`ferrule complete`: continue texts with a running server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ferrule.config.help import CommandUsage
from ferrule.config.option import opt
from ferrule.config.parse import parse_command
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins
from ferrule_plugins.command.terminal.options import ClientOptions, start


@dataclass(frozen=True, kw_only=True)
class CompleteOptions(ClientOptions):
    """Completions by a running server."""

    quick: str | None = opt(
        None, "Send one prompt, print the completion, and exit; - reads it from standard input.", aliases=("-q",)
    )


class CompleteCommand(Command):
    summary = "Complete texts with a model on a running server."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """Run the session. Returns 1 when the server did not answer."""
        usage = CommandUsage("ferrule complete", self.summary)
        parsed = parse_command(argv, usage, plugins, sections={"complete": CompleteOptions})
        if parsed is None:
            return 0
        from ferrule_plugins.command.terminal.conversation import Completions

        for notice in parsed.notices:
            print(notice, file=sys.stderr)
        options: CompleteOptions = parsed.extra["complete"]
        return start(options, options.quick, Completions, history=False)
