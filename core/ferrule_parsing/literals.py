"""Values as programs write them (``'a'``, ``True``, ``(1, 2)``, ``{key: 1}``), to JSON while they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring

from ferrule_parsing.reader import Reader, Tags

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[^xuU0-7]|[xuU])", re.DOTALL)
_UNFINISHED = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{1,2})?")
_MEANT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "/": "/"}
_MEANT |= {mark: mark for mark in "\\'\""}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_PLAIN = re.compile(r"[^,()\[\]{}'\"\\]+")
_MOST_SPACE = 64  # between a string and what follows it
_BEHIND = re.compile(rf"\s{{0,{_MOST_SPACE}}}")


@dataclass(frozen=True)
class Literals:
    """A language's way to write values.

    `quotes`: what strings stand between. `escapes`: whether a backslash in a string means something. `assign`: between
    the name of an argument and its value; `end`: behind the last one. `bare`: characters of words, numbers and keys.
    """

    quotes: tuple[str, ...] = ("'", '"')
    escapes: bool = True
    assign: str = "="
    end: str = ")"
    separator: str = ", "
    bare: re.Pattern[str] = re.compile(r"""[^\s,()\[\]{}:='"]+""")

    @cached_property
    def opening(self) -> Tags:
        return Tags(*self.quotes)

    @cached_property
    def inside(self) -> dict[str, Tags]:
        """The tags to search a string for, by its quote."""
        return {quote: Tags(quote, "\\") if self.escapes else Tags(quote) for quote in self.quotes}


class _Frame:
    """A value with parts that is being read. `keyed`: its parts have names."""

    __slots__ = ("close", "count", "keyed", "ours")

    def __init__(self, close: str, *, keyed: bool, ours: bool = False) -> None:
        self.close, self.keyed, self.ours = close, keyed, ours
        self.count = 0


class ExpressionReader:
    """The text of an expression, up to the comma or the bracket behind it. `quotes`: it may have strings."""

    def __init__(self, *, quotes: bool) -> None:
        self._quotes = quotes
        self._depth = 0
        self._quote = ""

    def read(self, reader: Reader) -> tuple[str, bool]:
        """Return (the next text, whether the expression ends with it)."""
        start = reader.at
        while not reader.empty:
            reader.match(_PLAIN)
            if reader.empty:
                break
            char = reader.text[reader.at]
            if self._quote:
                self._quote = "" if char == self._quote else self._quote
            elif char in "'\"" and self._quotes:
                self._quote = char
            elif char in _CLOSING:
                self._depth += 1
            elif char in ")]}" and self._depth:
                self._depth -= 1
            elif not self._depth and char in ",)]}":
                return reader.text[start : reader.at], True
            reader.at += 1
        return reader.text[start : reader.at], False


class LiteralReader:
    """The arguments of one call, from behind what opens them to what closes them, or (`arguments` False) one value.

    `names`: of the arguments in order, for those that come without a name. Values that are not known words or numbers
    are strings, and so is what is not a value but an expression. A quote ends a string only where something may follow
    the string, so that quotes in it need no escape. A set is a list.
    """

    def __init__(self, syntax: Literals, names: Sequence[str] = (), *, arguments: bool = True) -> None:
        self.done = False
        self.failed = False
        self._syntax = syntax
        self._names = names
        self._out: list[str] = []
        self._frames = [_Frame(syntax.end, keyed=True, ours=True)] if arguments else []
        self._state: Callable[[Reader], bool] = self._first if arguments else self._value
        self._quote = ""
        self._is_key, self._bare = False, list[str]()
        self._expression = ExpressionReader(quotes=True)  # that is being read
        self._undecided: int | None = None  # where in the output an object begins that may be a set

    def read(self, reader: Reader) -> str:
        """Return the JSON text of what has come."""
        while not self.done and not self.failed and self._state(reader):
            pass
        known = len(self._out) if self._undecided is None else self._undecided
        text = "".join(self._out[:known])
        del self._out[:known]
        self._undecided = self._undecided and 0
        return text

    # ---- states: whether the next one may have something to read

    def _first(self, reader: Reader) -> bool:
        """Read in front of a part, or of the bracket that closes a value without parts."""
        if not reader.past_space():
            return False
        frame = self._frames[-1]
        if reader.take(frame.close):
            self._undecided = None
            return self._pop()
        self._state = self._key if frame.keyed else self._value
        return True

    def _key(self, reader: Reader) -> bool:
        quote = reader.take_any(self._syntax.opening)
        if quote is None:
            return False
        frame = self._frames[-1]
        if quote and frame.ours and self._syntax.assign == "=":
            return self._positional(quote)
        if quote:
            self._open(quote, is_key=True)
        elif frame.ours and self._at(reader) in "[({":
            return self._positional("")
        elif self._undecided is not None and self._at(reader) in "[({":
            self._be_set()
            self._state = self._value
        else:
            self._state, self._is_key = self._in_bare, True
        return True

    def _positional(self, quote: str) -> bool:
        """Begin an argument without a name."""
        count = self._frames[-1].count
        name = self._names[count] if count < len(self._names) else f"arg{count}"
        self._out.append(("{" if not count else ", ") + encode_basestring(name) + ": ")
        self._frames[-1].count += 1
        if quote:
            self._open_text(quote)
        else:
            self._state = self._value
        return True

    def _value(self, reader: Reader) -> bool:
        if not reader.past_space():
            return False
        quote = reader.take_any(self._syntax.opening)
        if quote is None:
            return False
        if quote:
            self._open(quote, is_key=False)
            return True
        self._begin_part()
        opening = self._at(reader)
        if opening in _CLOSING:
            reader.at += 1
            if opening == "{":
                self._undecided = len(self._out)
            self._out.append("{" if opening == "{" else "[")
            self._frames.append(_Frame(_CLOSING[opening], keyed=opening == "{"))
            self._state = self._first
        else:
            self._state, self._is_key = self._in_bare, False
        return True

    def _in_bare(self, reader: Reader) -> bool:
        self._bare.append(reader.match(self._syntax.bare))
        if reader.empty:
            return False
        token = "".join(self._bare)
        self._bare = []
        if not token:
            self.failed = True
        elif self._is_key:
            self._bare, self._state = [token], self._named
        else:
            self._bare, self._state = [token], self._behind_bare
        return True

    def _behind_bare(self, reader: Reader) -> bool:
        """Read behind a word or number, which is a value unless it begins an expression."""
        self._bare.append(reader.space())
        if reader.empty and self._frames:
            return False
        if self._frames and self._at(reader) not in ",)]}":
            self._expression, self._state = ExpressionReader(quotes=self._syntax.escapes), self._in_expression
            return True
        self._out.append(_scalar(self._bare[0]))
        self._bare, self._state = [], self._behind
        return True

    def _in_expression(self, reader: Reader) -> bool:
        """Read an expression, which is not a value and becomes a string of its text."""
        text, ended = self._expression.read(reader)
        self._bare.append(text)
        if ended:
            self._out.append(encode_basestring("".join(self._bare).strip()))
            self._bare, self._state = [], self._behind
        return ended

    def _named(self, reader: Reader) -> bool:
        """Read behind a word that may be a name."""
        if not reader.past_space():
            return False
        token, frame = self._bare[0], self._frames[-1]
        self._bare = []
        if frame.ours and self._at(reader) != self._syntax.assign:
            self._positional("")
        elif self._undecided is not None and self._at(reader) != ":":
            self._be_set()
            self._begin_part()
        else:
            self._write_key(encode_basestring(token))
            self._state = self._assigned
            return True
        self._bare, self._state = [token], self._behind_bare
        return True

    def _assigned(self, reader: Reader) -> bool:
        if not reader.past_space():
            return False
        if self._undecided is not None and self._at(reader) in ",}":
            self._be_set()
            self._frames[-1].count = 1
            self._state = self._behind
            return True
        self._undecided = None
        self.failed = not reader.take(self._syntax.assign if self._frames[-1].ours else ":")
        self._out.append(": ")
        self._state = self._value
        return True

    def _in_string(self, reader: Reader) -> bool:
        tags, tag = self._syntax.inside[self._quote], "\\"
        while tag == "\\":
            text, tag = reader.until(tags)
            self._out.append(_inside(text))
            if tag == "\\" and not self._escape(reader):
                return False
            if tag == self._quote and self._frames and len(tag) == 1:
                ends = _ends_string(reader)
                if ends is None:
                    reader.at -= 1
                    return False
                if not ends:
                    self._out.append(_inside(tag))
                    tag = "\\"
        if tag:
            self._out.append('"')
            self._state = self._assigned if self._is_key else self._behind
        return bool(tag)

    def _escape(self, reader: Reader) -> bool:
        """Read the escape whose backslash was read."""
        reader.at -= 1
        found = _ESCAPE.match(reader.text, reader.at)
        if found is None or (found.end() == len(reader.text) and _UNFINISHED.fullmatch(found[0])):
            return False
        reader.at = found.end()
        self._out.append(_escaped(found[0]))
        return True

    def _behind(self, reader: Reader) -> bool:
        """Read behind a value."""
        if not self._frames:
            self.done = True
            return False
        if not reader.past_space():
            return False
        if reader.take(","):
            self._state = self._first
        elif reader.take(self._frames[-1].close):
            return self._pop()
        else:
            self.failed = True
        return True

    # ---- helpers

    def _pop(self) -> bool:
        frame = self._frames.pop()
        if frame.ours:
            self._out.append("}" if frame.count else "{}")
            self.done = True
        else:
            self._out.append("}" if frame.keyed else "]")
            self._state = self._behind
        return True

    def _be_set(self) -> None:
        """Turn what began as an object into a set, written as a list."""
        self._out[self._undecided or 0] = "["
        self._frames[-1].keyed, self._undecided = False, None

    def _begin_part(self) -> None:
        """Write a comma in front of each part of a list but the first."""
        if self._frames and not self._frames[-1].keyed:
            self._out.append(", " if self._frames[-1].count else "")
            self._frames[-1].count += 1

    def _write_key(self, key: str) -> None:
        frame = self._frames[-1]
        self._out.append((", " if frame.count else "{" if frame.ours else "") + key)
        frame.count += 1

    def _open(self, quote: str, *, is_key: bool) -> None:
        if is_key:
            self._write_key("")
        else:
            self._begin_part()
        self._open_text(quote)
        self._is_key = is_key

    def _open_text(self, quote: str) -> None:
        self._out.append('"')
        self._quote, self._is_key, self._state = quote, False, self._in_string

    def _at(self, reader: Reader) -> str:
        return reader.text[reader.at]


def _ends_string(reader: Reader) -> bool | None:
    """Return whether a quote is followed by what may stand behind a string. None: more text is needed to decide."""
    found = _BEHIND.match(reader.text, reader.at)
    at = reader.at if found is None else found.end()
    if at == len(reader.text):
        return None if at - reader.at < _MOST_SPACE else False
    return reader.text[at] in ",)]}:"


def json_of_literal(text: str) -> str | None:
    """Return the JSON text of a value as Python writes it; None for anything else."""
    reader = Reader()
    reader.push(text + "\n")
    value = LiteralReader(Literals(), arguments=False)
    found = value.read(reader)
    word = text in _WORDS or _NUMBER.fullmatch(text) is not None
    whole = value.done and not reader.rest().strip()
    return found if whole and (word or text[:1] in "[({'\"") else None


def _scalar(token: str) -> str:
    """Return the JSON text of a word or number; anything else becomes a string."""
    if token in _WORDS:
        return _WORDS[token]
    if _NUMBER.fullmatch(token):
        return token
    for convert in (lambda: int(token, 0), lambda: int(token), lambda: float(token)):
        try:
            return json.dumps(convert(), allow_nan=False)
        except ValueError:
            continue
    return encode_basestring(token)


def _inside(text: str) -> str:
    """Return a text as it is written inside a JSON string, without the quotes."""
    return encode_basestring(text)[1:-1]


def _escaped(escape: str) -> str:
    """Return what an escape means, as written inside a JSON string. An unknown escape stays as it is."""
    kind = escape[1]
    if kind == "u" and len(escape) == 6:
        return escape
    if kind in "xU" and len(escape) > 2:
        number = int(escape[2:], 16)
        return json.dumps(chr(number))[1:-1] if number <= 0x10FFFF else _inside(escape)
    if kind in "01234567":
        return _inside(chr(int(escape[1:], 8)))
    return _inside(_MEANT.get(kind, escape))
