"""Calls with arguments in JSON: a whole call as one object, or a name and then the object of its arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferrule.forms import Fixed, Form, Json, Regex, Series
from ferrule.structured_outputs.calls import EnforcedFunction
from ferrule_parsing.calls import CallWriter
from ferrule_parsing.formats import CallReader, CallSyntax, Schemas
from ferrule_parsing.heads import HeadedCall, HeadedReader
from ferrule_parsing.json_object import MemberText, ObjectReader, unquote
from ferrule_parsing.reader import Reader


@dataclass(frozen=True)
class JsonCall(CallSyntax):
    """A call ``{"name": "f", "arguments": {…}}``, with white space anywhere between the parts.

    `arguments_keys`: the spellings of the second key; the first one is generated. "arguments" and "parameters" are read
    in the place of each other. `id_key`: a member that comes first and numbers the calls. Arguments that come before
    the name wait for it. Of keys that come twice the first counts; others are left out.
    """

    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments",)
    id_key: str | None = None

    def begins(self, text: str, at: int) -> bool:
        return text.startswith("{", at)

    def reader(self, schemas: Schemas, exact: frozenset[str], *, unmarked: bool) -> CallReader:
        return _ObjectCall(self, frozenset(schemas) if unmarked else None)

    def form(self, function: EnforcedFunction) -> Form:
        name, arguments = json.dumps(self.name_key), json.dumps(self.arguments_keys[0])
        call = f"{name}: {json.dumps(function.name, ensure_ascii=False)}, {arguments}: "
        number = () if self.id_key is None else (Fixed(f'{{"{self.id_key}": "'), Regex("[0-9]{1,3}"))
        begin = "{" if self.id_key is None else '", '
        return Series((*number, Fixed(begin + call), Json(function.schema), Fixed("}")))


class _ObjectCall(CallReader):
    """A reader of an object that is a call. `known`: the only names that make an object a call, where nothing else says
    that it is one.
    """

    def __init__(self, syntax: JsonCall, known: frozenset[str] | None) -> None:
        self._syntax = syntax
        self._arguments_keys = _ARGUMENTS.union(syntax.arguments_keys) - {syntax.name_key}
        self._known = known
        self._before_name = _BEFORE_NAME | {syntax.id_key}
        self._object = ObjectReader()
        self._name: list[str] = []
        self._unsent: list[str] = []  # arguments before the name is known, or that are not an object
        self._began = self._whole = self._streams = False  # arguments: seen, complete, an object

    def read(self, reader: Reader, out: CallWriter) -> None:
        reader.at = self._object.feed(reader.text, reader.at)
        for member in self._object.take():
            if not self.failed:  # the same whether the rest comes at once or later
                self._read(member, out)
        if self._object.done or self._object.failed:
            self.done, self.failed = self._object.done, self.failed or self._object.failed
            if self.named:
                out.arguments("".join(self._unsent) if self._began or not self.done else "{}")

    def finish(self, out: CallWriter) -> None:
        out.arguments("".join(self._unsent))

    def _read(self, member: MemberText, out: CallWriter) -> None:
        if member.key == self._syntax.name_key and not self.named:
            self._name.append(member.text)
            if member.last:
                self._start(unquote("".join(self._name)), out)
                self._name = []
        elif member.key in self._arguments_keys and not self._whole:
            self._read_arguments(member, out)
        elif self._known is not None and not self.named and member.key not in self._before_name:
            self.failed = True  # an object that is not a call need not be read to its end

    def _start(self, name: str | None, out: CallWriter) -> None:
        if name and (self._known is None or name in self._known):
            self.named = True
            out.start(name)
            self._release(out)
        elif self._known is not None:
            self.failed = True

    def _read_arguments(self, member: MemberText, out: CallWriter) -> None:
        if not self._began:
            self._began = True
            self._streams = member.text.startswith("{")
        self._whole = member.last
        self._unsent.append(member.text)
        if self.named:
            self._release(out)

    def _release(self, out: CallWriter) -> None:
        """Write the arguments that wait: an object as far as it has come; else, when the value is whole, a string as
        its text, null as {}.
        """
        if not self._streams and not self._whole:
            return
        text = "".join(self._unsent)
        self._unsent = []
        if not self._streams:
            text = "{}" if text == "null" else unquote(text) or text
        out.arguments(text)


_ARGUMENTS = frozenset(("arguments", "parameters"))
_BEFORE_NAME = frozenset(("id", "type"))


@dataclass(frozen=True)
class NamedJson(HeadedCall):
    """A call ``name {…}`` with markup around the name: the text between it and its arguments is part of `head`.

    `end`: the text that is generated behind the arguments. Each of its words and tags may be missing. Of a numbered
    head, the number may stand alone: the call is that of the only function, or of the one whose parameters fit.
    """

    end: str = ""

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.end.replace("<", " <").split())

    def reader(self, schemas: Schemas, exact: frozenset[str], *, unmarked: bool) -> CallReader:
        return _NamedCall(self, schemas, frozenset(schemas) if unmarked else None)

    def form(self, function: EnforcedFunction) -> Form | None:
        head = self.head.form(function.name)
        return None if head is None else Series((*head, Json(function.schema), *_fixed(self.end)))


class _NamedCall(HeadedReader):
    def __init__(self, syntax: NamedJson, schemas: Schemas, known: frozenset[str] | None) -> None:
        super().__init__(syntax.head, known, follow="{")
        self._prefix, self._numbered = syntax.head.prefix, syntax.head.numbered
        self._schemas = schemas
        self._number = ""  # in the place of a name that is not known yet
        self._unsent: list[str] = []  # arguments of a call without a name
        self._begun = False  # the first character of the arguments has come
        self._object = ObjectReader()

    def read(self, reader: Reader, out: CallWriter) -> None:
        if self._number:
            self.read_arguments(reader, out)
        else:
            super().read(reader, out)

    def start(self, name: str, id: str | None, out: CallWriter) -> None:
        alone = self._numbered and name.isdecimal() and name not in self._schemas
        if alone and len(self._schemas) == 1:
            name, id = next(iter(self._schemas)), self._id(next(iter(self._schemas)), name)
        elif alone:
            self._number = name
            return
        super().start(name, id, out)

    def read_arguments(self, reader: Reader, out: CallWriter) -> None:
        if not self._begun:
            reader.space()
            self._begun = not reader.empty
        start = reader.at
        reader.at = self._object.feed(reader.text, start)
        self._send(reader.text[start : reader.at], out)
        self.done, self.failed = self._object.done, self._object.failed
        if self._object.unclosed:
            self._send("}", out)
        if self._number and (self.done or self._object.unclosed):
            self._choose(out)

    def _send(self, text: str, out: CallWriter) -> None:
        if self._number:
            self._unsent.append(text)
        else:
            out.arguments(text)

    def _choose(self, out: CallWriter) -> None:
        """Start the call of the function whose parameters fit; where not exactly one does, the text is not a call."""
        arguments, number = "".join(self._unsent), self._number
        found = [name for name, schema in self._schemas.items() if _fits(arguments, schema)]
        self._number = ""
        self.failed = self.failed or len(found) != 1
        if len(found) == 1:
            super().start(found[0], self._id(found[0], number), out)
            out.arguments(arguments)

    def _id(self, name: str, number: str) -> str:
        return f"{self._prefix}{name}:{number}"


def _fits(arguments: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a function has parameters with the names of these arguments, and requires no others."""
    try:
        keys = set(json.loads(arguments))
    except (ValueError, RecursionError):
        return False
    return keys <= set(schema.get("properties") or ()) and keys >= set(schema.get("required") or ())


def _fixed(text: str) -> tuple[Fixed, ...]:
    return (Fixed(text),) if text else ()
