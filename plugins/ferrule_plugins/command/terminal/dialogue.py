"""The loop of a client on a terminal: read a message or a command, show the answer as it comes."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ferrule.errors import nearest
from ferrule_plugins.command.terminal.chunks import Figures, ShownAnswer, told
from ferrule_plugins.command.terminal.client import Server, Unanswered
from ferrule_plugins.command.terminal.editor import Reader
from ferrule_plugins.command.terminal.screen import Screen, one_line, unechoed

_COMMAND = re.compile(r"/([a-z]+)(?:[ \t\n]+(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Action:
    """A command that begins with a slash. `argument` is its placeholder in the help."""

    doc: str
    run: Callable[[str], None]
    argument: str = ""


class Leave(Exception):
    """A request of the user to end the session."""


class Dialogue(ABC):
    """One session with one server. `fields` are part of every request, unchanged."""

    route: str

    def __init__(self, server: Server, model: str, screen: Screen, fields: Mapping[str, Any], *, stats: bool) -> None:
        self.server = server
        self.model = model
        self.screen = screen
        self.figures = Figures()
        self._fields = fields
        self._stats = stats
        self._last = ""
        self._warned: set[str] = set()

    @abstractmethod
    def body(self, text: str) -> dict[str, Any]:
        """Return the request for an answer to `text`, without the fields that all requests have."""

    def keep(self, text: str, answer: ShownAnswer) -> None:
        """Remember an exchange, whole or stopped by the user."""

    def actions(self) -> dict[str, Action]:
        return {
            "stats": Action("Figures of the last answer and of the session.", self._show_stats),
            "model": Action("List the server's models, or change to another one.", self._change_model, "[NAME]"),
            "help": Action("This list.", self._help),
            "exit": Action("Exit; so do Ctrl-D, and Ctrl-C at an empty prompt.", self._exit),
        }

    def ask(self, text: str) -> None:
        """Send a message, show the answer, and keep both. Raises Unanswered.

        KeyboardInterrupt ends the request, and the text that had come is kept.
        """
        answer = ShownAnswer()
        try:
            with closing(
                self.server.stream(self.route, {"model": self.model, **self.body(text), **self._fields})
            ) as it:
                for chunk in it:
                    for fragment in answer.take(chunk):
                        self.screen.show(fragment)
        except KeyboardInterrupt:
            self._over(text, answer)
            raise
        finally:
            self.screen.end()
        self._over(text, answer)
        for warning in dict.fromkeys(answer.warnings):
            if warning not in self._warned:  # fields are the same each time
                self.screen.note(f"warning: {one_line(warning)}")
        self._warned.update(answer.warnings)
        if self._stats:
            self.screen.note(self._last)

    def _over(self, text: str, answer: ShownAnswer) -> None:
        self.keep(text, answer)
        self.figures.add(answer)
        self._last = told(answer)

    def run(self, reader: Reader, *, interactive: bool) -> int:
        """Read and answer messages until the input ends. Returns 1 when a message failed and no user was there to
        correct it.
        """
        status = 0
        while True:
            try:
                text = reader.read()
            except (EOFError, KeyboardInterrupt):
                return status
            try:
                if text.strip() and not self._obey(text):
                    with unechoed(sys.stdin):
                        self.ask(text)
            except Unanswered as error:
                self.screen.error(one_line(str(error)))
                status = 0 if interactive else 1
            except Leave:
                return status
            except KeyboardInterrupt:
                if not interactive:
                    raise
                self.screen.note("(stopped)")

    # ------------------------------------------------------------------------------------ commands

    def _obey(self, text: str) -> bool:
        """Run a command. Return False when the text is a message."""
        match = _COMMAND.fullmatch(text.rstrip())
        if match is None:
            return False
        actions = self.actions()
        action = actions.get(match[1])
        if action is None:
            return self.unknown(match[1], nearest(f"/{match[1]}", [f"/{name}" for name in actions]))
        action.run((match[2] or "").strip())
        return True

    def unknown(self, name: str, meant: str) -> bool:
        """Handle a word that looks like a command but is not one; return False to send the text as a message."""
        self.screen.error(f"There is no command /{name}.{meant} To send it as a message, begin it with a space.")
        return True

    def _show_stats(self, argument: str) -> None:
        if self._last:
            self.screen.note(f"last answer: {self._last}")
        self.screen.note(self.figures.told())

    def _change_model(self, name: str) -> None:
        names = self.server.models()
        if name and name in names:
            self.model = name
        elif name:
            self.screen.error(f"The server has no model {name!r}.{nearest(name, names)}")
            return
        for each in names:
            self.screen.note(f"{'*' if each == self.model else ' '} {each}")

    def _help(self, argument: str) -> None:
        for name, action in self.actions().items():
            self.screen.note(f"{f'/{name} {action.argument}'.rstrip():<16}{action.doc}")
        self.screen.note("Enter sends. Alt-Enter, or a backslash at the end of a line, begins a new line.")
        self.screen.note("Ctrl-C stops an answer.")

    def _exit(self, argument: str) -> None:
        raise Leave
