"""Enforced calls where no tool parser can enforce them: the output is JSON and nothing else."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from ferrule.forms import Fixed, GrammarSpec, Json, OneOf, Repeated, Series
from ferrule.interfaces.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    ChoiceContext,
    Event,
    TextDelta,
    ToolParser,
)
from ferrule.structured_outputs.calls import enforced

_PARAMETERS = 3  # depth at which the parameters of a call begin
_PLAIN = re.compile(r'[^"\\{}\[\]]+')


class NamedCall(ToolParser):
    """The output is the arguments of the one function that the request names."""

    def begin(self, context: ChoiceContext) -> None:
        choice = context.tool_choice
        self._name = choice["function"]["name"] if isinstance(choice, dict) else ""
        self._begun = False

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        function = enforced(self.tools, choice)[0]
        return GrammarSpec(form=Json(function.schema))

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        if not delta.text:
            return ()
        start = () if self._begun else (CallStart(0, _id(), self._name),)
        self._begun = True
        return (*start, CallArguments(0, delta.text))

    def finish(self) -> Sequence[Event]:
        return (CallEnd(0),) if self._begun else ()


class CallList(ToolParser):
    """The output is ``[{"name": "f", "parameters": {…}}, …]``, spelt exactly so outside of the parameters."""

    def begin(self, context: ChoiceContext) -> None:
        self._most = None if context.parallel_tool_calls else 1
        self._index = -1
        self._head: list[str] = []  # text outside of parameters since the last ones
        self._depth = 0  # of braces and brackets
        self._string = self._escaped = False
        self._named = False  # whether the head before the last parameters names a function

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        functions = enforced(self.tools, choice)
        calls = tuple(Series((Fixed(_head(each.name)), Json(each.schema), Fixed("}"))) for each in functions)
        return GrammarSpec(form=Series((Fixed("["), Repeated(OneOf(calls), ", ", 1, self._most), Fixed("]"))))

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        events: list[Event] = []
        text, at = delta.text, 0
        while at < len(text):
            start, inside = at, self._inside
            while at < len(text) and self._inside is inside:
                at = self._step(text, at)
            if inside:
                self._read_parameters(text[start:at], events)
            else:
                self._read_head(text[start:at], events)
        return events

    def finish(self) -> Sequence[Event]:
        return (CallEnd(self._index),) if self._inside and self._named else ()

    @property
    def _inside(self) -> bool:
        """Whether the text is within parameters: in the list, in a call, and in an object of its own."""
        return self._depth >= _PARAMETERS

    def _read_head(self, part: str, events: list[Event]) -> None:
        """Collect text up to, and with, the brace that opens parameters."""
        self._head.append(part)
        if not self._inside:
            return
        name = _name("".join(self._head))
        self._head.clear()
        self._named = name is not None
        if name is not None:
            self._index += 1
            events += CallStart(self._index, _id(), name), CallArguments(self._index, "{")

    def _read_parameters(self, part: str, events: list[Event]) -> None:
        if self._named:
            events.append(CallArguments(self._index, part))
            events += () if self._inside else (CallEnd(self._index),)

    def _step(self, text: str, at: int) -> int:
        """Return the place after one character that matters, or many that do not."""
        if self._escaped:
            self._escaped = False
            return at + 1
        plain = _PLAIN.match(text, at)
        if plain is not None:
            return plain.end()
        match text[at]:
            case '"':
                self._string = not self._string
            case "\\":
                self._escaped = self._string
            case "{" | "[" if not self._string:
                self._depth += 1
            case "}" | "]" if not self._string:
                self._depth -= 1
        return at + 1


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '


def _name(head: str) -> str | None:
    """Return the function that a head names, which ends with the brace that opens parameters; None if it is not the
    head of a call.
    """
    try:
        call = json.loads(f"{head[head.find('{') :]}}}}}")
    except ValueError:
        return None
    name = call.get("name")
    return name if isinstance(name, str) else None


def _id() -> str:
    return f"call_{secrets.token_hex(12)}"
