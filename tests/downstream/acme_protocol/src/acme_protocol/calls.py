"""Calls in Acme's notation: ``@call weather(city="Paris", days=3)``. Values are JSON."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from ferrule.forms import GrammarSpec
from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, Event, TextDelta, ToolParser

_MARK = "@call "
_NAME = re.compile(r"[A-Za-z0-9_.-]")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")
_COMMA = re.compile(r"\s*(,|\Z)")


class AcmeCalls(ToolParser):
    """One character after the other: a call is said when it is whole, and what turns out to be none is text."""

    conformance = "acme_protocol.conformance:PARSER"

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tools)
        self._names = {tool.get("function", {}).get("name") for tool in tools}
        self._count = 0
        self._plain: list[str] = []  # text that is decided
        self._held: list[str] = []  # from the mark's first character on
        self._name_end = 0  # in `held`, of the name; 0 while it goes on
        self._quoted = self._escaped = False

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        return None

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        events: list[Event] = []
        for char in delta.text:
            events += self._take(char)
        return events + self._say()

    def finish(self) -> Sequence[Event]:
        self._give_up()
        return self._say()

    def _take(self, char: str) -> Sequence[Event]:
        held = self._held
        if not held and char != "@":
            self._plain.append(char)
        elif len(held) < len(_MARK):
            if char != _MARK[len(held)]:
                self._give_up()
                return self._take(char)
            held.append(char)
        elif not self._name_end:
            if char != "(" and not _NAME.match(char):
                self._give_up()
                return self._take(char)
            if char == "(":
                self._name_end = len(held)
            held.append(char)
        else:
            held.append(char)
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == ")":
                return self._call()
            else:
                self._quoted = char == '"'
        return ()

    def _call(self) -> Sequence[Event]:
        text = "".join(self._held)
        name, arguments = text[len(_MARK) : self._name_end], _arguments(text[self._name_end + 1 : -1])
        if arguments is None or name not in self._names:
            self._give_up()
            return ()
        before = self._say()
        self._forget()
        index, self._count = self._count, self._count + 1
        fragment = CallArguments(index, json.dumps(arguments, ensure_ascii=False))
        return [*before, CallStart(index, f"acme-{secrets.token_hex(8)}", name), fragment, CallEnd(index)]

    def _say(self) -> list[Event]:
        text = "".join(self._plain)
        self._plain.clear()
        return [Content(text)] if text else []

    def _give_up(self) -> None:
        self._plain += self._held
        self._forget()

    def _forget(self) -> None:
        self._held.clear()
        self._name_end = 0
        self._quoted = self._escaped = False


def _arguments(text: str) -> dict[str, Any] | None:
    """Parse ``a="x", b=3`` to {"a": "x", "b": 3}; None for anything else."""
    found: dict[str, Any] = {}
    at = 0
    while text[at:].strip():
        key = _KEY.match(text, at)
        if key is None:
            return None
        try:
            found[key[1]], at = json.JSONDecoder().raw_decode(text, key.end())
        except (ValueError, RecursionError):
            return None
        comma = _COMMA.match(text, at)
        if comma is None:
            return None
        at = comma.end()
    return found
