"""One JSON object that arrives in parts, split into the raw values of its members."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

_LENIENT = json.JSONDecoder(strict=False)
_SPACE = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'["\\]')
_IN_NESTED = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r'[,{}\[\]" \t\r\n]')


class MemberText(NamedTuple):
    """A part of a member's value, verbatim. `last`: the value ends with it."""

    key: str
    text: str
    last: bool


class ObjectReader:
    """A reader of a JSON object's text, to be fed from the opening brace on, until `done` or `failed` is true.

    Values are not checked: in nested ones, brackets are counted and strings are skipped, so any balanced value is given
    verbatim. Errors in the outer object are found: a key that is not a string, a missing colon or comma.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._texts: list[MemberText] = []
        self._state: Callable[[str, int], int] = self._open
        self._key = ""
        self._parts: list[str] = []  # of a key that is being read
        self._depth = 0
        self._quoted = False
        self._escaped = False  # a backslash was the last character of the previous text

    @property
    def unclosed(self) -> bool:
        """Whether the object failed where a closing brace might stand."""
        return self.failed and self._state == self._after_value

    def feed(self, text: str, at: int = 0) -> int:
        """Read from `at` on, and return where reading stopped: at the end, behind the closing brace, or at a fault."""
        while at < len(text) and not self.done and not self.failed:
            at = self._state(text, at)
        return at

    def take(self) -> list[MemberText]:
        """Return the texts of members that were read since the last `take`."""
        texts, self._texts = self._texts, []
        return texts

    # ---- states: each reads at least one character, or fails, or goes to a state that does

    def _open(self, text: str, at: int) -> int:
        return self._expect(text, at, {"{": self._before_key})

    def _before_key(self, text: str, at: int) -> int:
        return self._expect(text, _skip(text, at), {'"': self._in_key, "}": self._close})

    def _colon(self, text: str, at: int) -> int:
        return self._expect(text, _skip(text, at), {":": self._value})

    def _after_value(self, text: str, at: int) -> int:
        return self._expect(text, _skip(text, at), {",": self._before_key, "}": self._close})

    def _expect(self, text: str, at: int, states: dict[str, Callable[[str, int], int]]) -> int:
        if at == len(text):
            return at
        state = states.get(text[at])
        if state is None:
            self.failed = True
            return at
        self._state = state
        self.done = state == self._close
        return at + 1

    def _close(self, text: str, at: int) -> int:
        return at  # never called: the object is done

    def _in_key(self, text: str, at: int) -> int:
        end, closed = self._string_end(text, at)
        self._parts.append(text[at:end])
        if closed:
            self._key = unquote('"' + "".join(self._parts)) or ""
            self._parts.clear()
            self._state = self._colon
        return end

    def _value(self, text: str, at: int) -> int:
        at = _skip(text, at)
        if at == len(text):
            return at
        first = text[at]
        if first in ",:}]":
            self.failed = True
            return at
        self._depth = 0
        self._state = self._in_scalar
        if first in '"{[':
            self._state = self._in_nested
        return at

    def _in_scalar(self, text: str, at: int) -> int:
        found = _AFTER_SCALAR.search(text, at)
        end = len(text) if found is None else found.start()
        return self._emit(text, at, end, last=found is not None)

    def _in_nested(self, text: str, at: int) -> int:
        """Read a nested value, or a string in it, by counting brackets of both kinds: at depth 0 the value is whole."""
        end = at
        while end < len(text):
            if self._quoted:
                end, closed = self._string_end(text, end)
                self._quoted = not closed
                if closed and self._depth == 0:
                    return self._emit(text, at, end, last=True)
                continue
            found = _IN_NESTED.search(text, end)
            if found is None:
                return self._emit(text, at, len(text), last=False)
            end = found.end()
            if found[0] == '"':
                self._quoted = True
            elif found[0] in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    return self._emit(text, at, end, last=True)
        return self._emit(text, at, end, last=False)

    def _emit(self, text: str, start: int, end: int, *, last: bool) -> int:
        self._texts.append(MemberText(self._key, text[start:end], last))
        if last:
            self._state = self._after_value
        return end

    def _string_end(self, text: str, at: int) -> tuple[int, bool]:
        """Return (the place behind the closing quote, True), or (the text's end, False)."""
        if self._escaped:
            self._escaped = False
            at += 1
        while True:
            found = _IN_STRING.search(text, at)
            if found is None:
                return len(text), False
            if found[0] == '"':
                return found.end(), True
            at = found.end() + 1
            if at > len(text):
                self._escaped = True
                return len(text), False


def unquote(raw: str) -> str | None:
    """Return the text of a JSON string; None for anything else. Line breaks in the string are accepted."""
    try:
        value = _LENIENT.decode(raw)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
