"""`ferrule chat`: talk to a running server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ferrule.config.help import CommandUsage
from ferrule.config.option import opt
from ferrule.config.parse import parse_command
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins
from ferrule_plugins.command.terminal.options import ClientOptions, start


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ClientOptions):
    """A conversation with a running server."""

    system_prompt: str | None = opt(None, "System prompt of the conversation.")
    quick: str | None = opt(
        None, "Send one message, print the response, and exit; - reads it from standard input.", aliases=("-q",)
    )
    history: bool = opt(
        True, "Save what is typed to ferrule/chat_history in XDG_STATE_HOME, as history for the next start."
    )


class ChatCommand(Command):
    summary = "Chat with a model on a running server."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """Run the conversation. Returns 1 when the server does not answer a single message."""
        usage = CommandUsage("ferrule chat", self.summary)
        parsed = parse_command(argv, usage, plugins, sections={"chat": ChatOptions})
        if parsed is None:
            return 0
        from ferrule_plugins.command.terminal.conversation import Conversation

        for notice in parsed.notices:
            print(notice, file=sys.stderr)
        options: ChatOptions = parsed.extra["chat"]

        def make(*parts: Any, **settings: Any) -> Conversation:
            return Conversation(*parts, **settings, system=options.system_prompt)

        return start(options, options.quick, make, options.history)
