"""Calls whose arguments are written as a program writes them: ``f(a=1, b='x')``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from ferrule.forms import Fixed, Form, Json, OneOf, Regex, Repeated, Series, Until
from ferrule.structured_outputs.calls import EnforcedFunction
from ferrule_parsing import argument_schemas
from ferrule_parsing.calls import CallWriter
from ferrule_parsing.formats import CallReader, Schemas
from ferrule_parsing.heads import CallHead, HeadedCall, HeadedReader
from ferrule_parsing.literals import LiteralReader, Literals
from ferrule_parsing.reader import Reader

_NAME = re.compile(r"[^\W\d]\w*")
_ANY_NAME = Regex(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_DEEPEST = 8  # levels of values in values, of which a schema may have any number
_PYTHON = {True: "True", False: "False", None: "None"}


@dataclass(frozen=True)
class LiteralCall(HeadedCall):
    """A name, and arguments as `literals` writes them, up to its `end`. `after`: what is generated behind it."""

    head: CallHead = CallHead(behind=("(",))
    literals: Literals = field(default_factory=Literals)
    after: str = ""

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.after.split())

    def reader(self, schemas: Schemas, exact: frozenset[str], *, unmarked: bool) -> CallReader:
        return _LiteralCall(self, schemas, frozenset(schemas) if unmarked else None)

    def form(self, function: EnforcedFunction) -> Form | None:
        head = self.head.form(function.name)
        members = self._members(function.schema)
        if head is None or members is None:
            return None
        return Series((*head, members, Fixed(self.literals.end + self.after)))

    def _members(self, schema: dict[str, Any], depth: int = 0) -> Form | None:
        """Return the form of the arguments, or of the members of an object at some depth."""
        each = [self._way(one, depth) for one in argument_schemas.ways(schema)]
        ways = tuple(one for one in each if one is not None)
        return None if not ways or len(ways) < len(each) else ways[0] if len(ways) == 1 else OneOf(ways)

    def _way(self, schema: dict[str, Any], depth: int) -> Form | None:
        found = argument_schemas.arguments(schema)
        if found is None:
            return None
        assign, separator = self.literals.assign, self.literals.separator
        if not found and schema.get("additionalProperties") is not False:
            others = argument_schemas.others(schema) or ({} if self.literals.escapes else {"type": "string"})
            value = self._value(others, depth)
            return None if value is None else Repeated(Series((_ANY_NAME, Fixed(assign), value)), separator)
        members: list[tuple[Form, bool]] = []
        for one in found:
            value = self._value(one.schema, depth)
            if value is None or _NAME.fullmatch(one.name) is None:
                return None
            members.append((Series((Fixed(one.name + assign), value)), one.required))
        return argument_schemas.listed(members, separator)

    def _value(self, schema: dict[str, Any], depth: int) -> Form | None:
        options = argument_schemas.options(schema)
        if options is None or depth > _DEEPEST:
            return Json(schema) if self.literals.escapes else None
        forms = [self._python(one) if self.literals.escapes else self._raw(one, depth + 1) for one in options]
        whole = [form for form in forms if form is not None]
        return OneOf(tuple(whole)) if len(whole) == len(options) else None

    def _python(self, schema: dict[str, Any]) -> Form:
        """Return the form of a value, where values that JSON spells otherwise have Python's spelling unless they are
        inside another value.
        """
        demands = argument_schemas.keywords(schema)
        if demands in ({"enum"}, {"const"}, {"type", "enum"}, {"type", "const"}):
            values = schema.get("enum", [schema.get("const")])
            if argument_schemas.all_valid(values, schema) and not any(isinstance(one, list | dict) for one in values):
                return OneOf(tuple(Fixed(_python(one)) for one in values))
        if demands == {"type"} and schema["type"] in ("boolean", "null"):
            words = ("True", "False") if schema["type"] == "boolean" else ("None",)
            return OneOf(tuple(map(Fixed, words)))
        return Json(schema)

    def _raw(self, schema: dict[str, Any], depth: int) -> Form | None:
        """Return the form of a value whose strings are written verbatim between quotes, without escapes. None where the
        schema cannot be expressed so.
        """
        quote = self.literals.quotes[0]
        kinds, demands = argument_schemas.types(schema), argument_schemas.keywords(schema)
        if kinds == {"array"} and demands <= {"type", "items", "minItems", "maxItems"}:
            return self._array(schema, depth)
        if kinds == {"object"}:
            members = self._members(schema, depth)
            return None if members is None else Series((Fixed("{"), members, Fixed("}")))
        if kinds and not kinds & {"string", "array", "object"}:
            return Json(schema)
        if kinds != {"string"}:
            return None
        values = schema.get("enum", [schema.get("const")])
        if demands <= {"type", "enum", "const"} and argument_schemas.all_valid(values, schema):
            plain = [value for value in values if quote not in value]
            return OneOf(tuple(Fixed(quote + value + quote) for value in plain)) if plain else None
        if demands <= {"type", "minLength", "maxLength"}:
            return Series((Fixed(quote), Until(quote, least=schema.get("minLength", 0), most=schema.get("maxLength"))))
        return None

    def _array(self, schema: dict[str, Any], depth: int) -> Form | None:
        items = schema.get("items", {"type": "string"})
        shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        value = self._value({**shared, **items}, depth) if isinstance(items, dict) else None
        if value is None:
            return None
        parts = Repeated(value, self.literals.separator, schema.get("minItems", 0), schema.get("maxItems"))
        return Series((Fixed("["), parts, Fixed("]")))


class _LiteralCall(HeadedReader):
    def __init__(self, syntax: LiteralCall, schemas: Schemas, known: frozenset[str] | None) -> None:
        super().__init__(syntax.head, known)
        self._syntax = syntax
        self._schemas = schemas
        self._arguments: LiteralReader  # of the call whose name was read

    def started(self, name: str) -> None:
        named, _ = argument_schemas.described(self._schemas.get(name, {}))
        self._arguments = LiteralReader(self._syntax.literals, tuple(named))

    def read_arguments(self, reader: Reader, out: CallWriter) -> None:
        out.arguments(self._arguments.read(reader))
        self.done, self.failed = self._arguments.done, self._arguments.failed


def _python(value: Any) -> str:
    return _PYTHON[value] if isinstance(value, bool) or value is None else json.dumps(value, ensure_ascii=False)
