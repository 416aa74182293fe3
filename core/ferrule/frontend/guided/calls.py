"""Enforced calls where no tool parser can enforce them: the output is JSON and nothing else."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from ferrule.interfaces.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    ChoiceContext,
    Event,
    TextDelta,
    ToolParser,
)
from ferrule.types import Fixed, GrammarSpec, Json, OneOf, Repeated, Series

_PLAIN = re.compile(r'[^"\\{}\[\]]+')


class NamedCall(ToolParser):
    """The output is the arguments of the one function that the request names."""

    def begin(self, context: ChoiceContext) -> None:
        choice = context.tool_choice
        self._name = choice["function"]["name"] if isinstance(choice, dict) else ""
        self._begun = False

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        return GrammarSpec(form=Json(_schemas(self.tools)[self._name]))

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
        self._head = ""  # text outside of parameters, up to where they begin
        self._depth = 0  # of braces and brackets within parameters
        self._string = self._escaped = False

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        calls = tuple(
            Series((Fixed(_head(name)), Json(schema), Fixed("}"))) for name, schema in _schemas(self.tools).items()
        )
        return GrammarSpec(form=Series((Fixed("["), Repeated(OneOf(calls), ", ", 1, self._most), Fixed("]"))))

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        events: list[Event] = []
        text, at = delta.text, 0
        while at < len(text):
            at = self._read_parameters(text, at, events) if self._depth else self._read_head(text, at, events)
        return events

    def finish(self) -> Sequence[Event]:
        return (CallEnd(self._index),) if self._depth else ()

    def _read_head(self, text: str, at: int, events: list[Event]) -> int:
        """Up to the brace that opens parameters: the second one of a call."""
        self._head += text[at]
        found = _HEAD.search(self._head)
        if found is not None:
            self._index += 1
            self._head, self._depth = "", 1
            events += CallStart(self._index, _id(), json.loads(found[1])), CallArguments(self._index, "{")
        return at + 1

    def _read_parameters(self, text: str, at: int, events: list[Event]) -> int:
        start = at
        while at < len(text) and self._depth:
            at = self._step(text, at)
        events.append(CallArguments(self._index, text[start:at]))
        if not self._depth:
            events.append(CallEnd(self._index))
        return at

    def _step(self, text: str, at: int) -> int:
        """Past one character that matters, or many that do not."""
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


_HEAD = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "parameters": *\{$')


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '


def _schemas(tools: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By name; every one is a schema of objects."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: _object(function.get("parameters")) for function in functions}


def _object(schema: dict[str, Any] | None) -> dict[str, Any]:
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return schema if "type" in schema else {"type": "object", **schema}


def _id() -> str:
    return f"call_{secrets.token_hex(12)}"
