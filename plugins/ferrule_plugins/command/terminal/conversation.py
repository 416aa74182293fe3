"""The two dialogues: a conversation that is remembered, and completions that are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrule_plugins.command.terminal.chunks import ShownAnswer
from ferrule_plugins.command.terminal.client import Server
from ferrule_plugins.command.terminal.dialogue import Action, Dialogue
from ferrule_plugins.command.terminal.screen import Screen

_NO_TOOLS = "This client cannot run tools."


class Conversation(Dialogue):
    """A conversation: every request has all messages so far. A message that failed is left out; one that was stopped is
    kept.
    """

    route = "/chat/completions"

    def __init__(
        self,
        server: Server,
        model: str,
        screen: Screen,
        fields: Mapping[str, Any],
        *,
        stats: bool,
        system: str | None,
    ) -> None:
        super().__init__(server, model, screen, fields, stats=stats)
        self._system = system
        self._messages: list[dict[str, Any]] = []

    def body(self, text: str) -> dict[str, Any]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return {"messages": [*system, *self._messages, _user(text)]}

    def keep(self, text: str, answer: ShownAnswer) -> None:
        """Add an exchange to the messages, without the thinking.

        The protocol requires a result for each call; as there are no tools here, that result is a sentence that says
        so.
        """
        if not answer.text and not answer.calls:
            return
        said: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.finish is None:  # stopped: a call may be cut in the middle of its arguments
            self._messages += [_user(text), said] if answer.text else []
            return
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls.values()
        ]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": _NO_TOOLS} for call in calls]
        self._messages += [_user(text), {**said, "tool_calls": calls} if calls else said, *results]

    def actions(self) -> dict[str, Action]:
        return {
            "reset": Action("Start a new conversation; the system prompt stays.", self._reset),
            "system": Action("Show the system prompt, or set it; - removes it.", self._set_system, "[TEXT]"),
            **super().actions(),
        }

    def _reset(self, argument: str) -> None:
        self._messages.clear()
        self.screen.note("The conversation was reset.")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = None if text == "-" else text
        self.screen.note(f"System prompt: {self._system}" if self._system else "There is no system prompt.")


class Completions(Dialogue):
    """A session of completions: every prompt stands alone and is sent exactly as it was typed."""

    route = "/completions"

    def body(self, text: str) -> dict[str, Any]:
        return {"prompt": text}

    def unknown(self, name: str, meant: str) -> bool:
        """Return False, so that the text is sent: a prompt may well begin with a slash."""
        return False


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
