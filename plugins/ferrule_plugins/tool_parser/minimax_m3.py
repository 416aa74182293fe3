"""`minimax_m3`: calls of MiniMax M3, whose arguments are elements, and in them objects, lists and their entries.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Lisbon]<]minimax[>[</city>]<]minimax[>[<days>
    ]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</days>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

Each call stands on one line. What stands in front of each tag is a token of its own.
https://github.com/vllm-project/vllm and https://github.com/sgl-project/sglang, their parsers `minimax_m3`
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from ferrule.forms import Fixed, Form, Json, OneOf, Repeated, Series, Until
from ferrule_parsing import CallHead, CallReader, EnforcedFunction, FormatParser, ToolFormat, argument_schemas
from ferrule_parsing.formats import Schemas
from ferrule_parsing.heads import HeadedCall
from ferrule_parsing.typed_text import json_of
from ferrule_plugins.tool_parser.elements import CONTAINERS, ElementsReader, Markup

_PREFIX = "]<]minimax[>["
_NAME = re.compile(r"[^<>/\s](?:[^<>]{0,254}[^<>\s])?")
_DEEPEST = 8  # levels of values in values that stand in elements of their own; deeper ones are JSON
_MOST_PARTS = 2000  # values of a function that do; others are JSON
_VALUES = ({"enum"}, {"const"}, {"type", "enum"}, {"type", "const"})


@dataclass(frozen=True)
class _Elements(HeadedCall):
    """A name, and an element for each argument: strings as they are, other scalars as JSON."""

    markup: Markup

    def reader(self, schemas: Schemas, exact: frozenset[str], *, unmarked: bool) -> CallReader:
        return ElementsReader(self.head, self.markup, schemas, exact)

    def form(self, function: EnforcedFunction) -> Form | None:
        """Return the form of a call. Arguments that the schema does not describe may be any elements."""
        head = self.head.form(function.name)
        if head is None:
            return None
        prefix, call, block = self.markup.prefix, self.markup.call, self.markup.block
        end = f"{prefix}</{call}>"
        if argument_schemas.keywords(function.schema) <= {"type"} and "properties" not in function.schema:
            others = (f"{prefix}<{call}", f"{prefix}<{block}>", f"{prefix}</{block}>")
            return Series((*head, Until(end, without=others)))
        members = _Forms(self.markup).members(function.schema, 0)
        return None if members is None else Series((*head, members, Fixed(end)))


class _Forms:
    """A maker of the forms of one function's arguments."""

    def __init__(self, markup: Markup) -> None:
        self._markup = markup
        self._left = _MOST_PARTS

    def members(self, schema: dict[str, Any], depth: int) -> Form | None:
        """Return the form of the members of an object. None where the schema cannot be expressed so."""
        ways = argument_schemas.ways(schema)
        each = [self._way(one, depth) for one in ways]
        found = tuple(one for one in each if one is not None)
        if not found or len(found) < len(each) or not _read_alike(ways):
            return None
        return found[0] if len(found) == 1 else OneOf(found)

    def _way(self, schema: dict[str, Any], depth: int) -> Form | None:
        found = argument_schemas.arguments(schema)
        if found is None or ("properties" not in schema and schema.get("additionalProperties") is not False):
            return None
        forms = [(self._element(one.name, one.schema, depth), one.required) for one in found]
        whole = [(form, required) for form, required in forms if form is not None]
        return argument_schemas.listed(whole, "") if len(whole) == len(forms) else None

    def _element(self, name: str, schema: dict[str, Any], depth: int) -> Form | None:
        self._left -= 1
        if _NAME.fullmatch(name) is None or self._markup.outside(name):
            return None
        value = self._value(name, schema, depth)
        return None if value is None else Series((Fixed(f"{self._markup.prefix}<{name}>"), value))

    def _value(self, name: str, schema: dict[str, Any], depth: int) -> Form | None:
        """Return the form of a value and the tag behind it, or None."""
        kinds, options = argument_schemas.types(schema), argument_schemas.options(schema)
        may_be_text = not kinds or "string" in kinds
        if options is None:
            return None if may_be_text else self._json(name, schema)
        if may_be_text and (kinds & CONTAINERS or not _keep_their_type(options)):
            return None
        nested = sum(bool(argument_schemas.types(one) & CONTAINERS) for one in options) == 1 and self._left > 0
        forms = [self._option(name, one, kinds, depth if nested else _DEEPEST) for one in options]
        whole = tuple(form for form in forms if form is not None)
        return None if len(whole) < len(forms) else whole[0] if len(whole) == 1 else OneOf(whole)

    def _option(self, name: str, schema: dict[str, Any], kinds: frozenset[str], depth: int) -> Form | None:
        own, demands, end = argument_schemas.types(schema), argument_schemas.keywords(schema), self._end(name)
        if demands in _VALUES:
            return self._one_of(schema.get("enum", [schema.get("const")]), schema, kinds, end)
        if own <= {"string"}:
            if not demands <= {"type", "minLength", "maxLength"}:
                return None
            text = Until(self._markup.prefix, least=schema.get("minLength", 0), most=schema.get("maxLength"))
            return Series((text, Fixed(f"</{name}>")))
        inside: Form | None = None
        if depth < _DEEPEST and own == {"object"}:
            inside = self.members(schema, depth + 1)
        elif depth < _DEEPEST and own == {"array"} and demands <= {"type", "items", "minItems", "maxItems"}:
            inside = self._entries(schema, depth + 1)
        return self._json(name, schema) if inside is None else Series((inside, Fixed(end)))

    def _entries(self, schema: dict[str, Any], depth: int) -> Form | None:
        items = schema.get("items", {"type": "string"})
        shared = argument_schemas.definitions(schema)
        element = self._element(self._markup.entry, {**shared, **items}, depth) if isinstance(items, dict) else None
        return element and Repeated(element, "", schema.get("minItems", 0), schema.get("maxItems"))

    def _one_of(self, values: list[Any], schema: dict[str, Any], kinds: frozenset[str], end: str) -> Form | None:
        """Return the form of those values that are read as what they are, or None."""
        if not argument_schemas.all_valid(values, schema):
            return None
        texts = {
            json.dumps(one, ensure_ascii=False): one if isinstance(one, str) else json.dumps(one) for one in values
        }
        read = [
            text for value, text in texts.items() if json_of(text, kinds) == value and self._markup.prefix not in text
        ]
        return OneOf(tuple(Fixed(text + end) for text in read)) if read else None

    def _json(self, name: str, schema: dict[str, Any]) -> Form:
        return Series((Json(schema), Fixed(self._end(name))))

    def _end(self, name: str) -> str:
        return f"{self._markup.prefix}</{name}>"


def _keep_their_type(options: list[dict[str, Any]]) -> bool:
    """Return whether a string that looks like a value of another type, and is read as one, fits as well."""
    strings = [one for one in options if argument_schemas.types(one) <= {"string"}]
    free = any(argument_schemas.keywords(one) not in _VALUES for one in strings)
    return not free or all(argument_schemas.keywords(one) <= {"type"} for one in options if one not in strings)


def _read_alike(ways: list[dict[str, Any]]) -> bool:
    """Return whether objects and lists of one name have one schema, so that they are read in the same way."""
    seen: dict[str, Any] = {}
    named = ((name, value) for way in ways for name, value in way.get("properties", {}).items())
    return all(seen.setdefault(name, value) == value or not _contains(value) for name, value in named)


def _contains(schema: Any) -> bool:
    return isinstance(schema, dict) and bool(argument_schemas.types(schema) & CONTAINERS)


class MiniMaxM3(FormatParser):
    conformance = "ferrule_testkit.samples.tool_parser:MINIMAX_M3"
    special_tokens = (_PREFIX,)
    format = ToolFormat(
        open=(f"{_PREFIX}<tool_call>",),
        close=(f"{_PREFIX}</tool_call>",),
        separator="\n",
        padding=("\n", "\n"),
        calls=(
            _Elements(
                CallHead(f'{_PREFIX}<invoke name="', ('">',)),
                markup=Markup(_PREFIX, block="tool_call", call="invoke", entry="item"),
            ),
        ),
        dropped=(f"{_PREFIX}<", (f"{_PREFIX}<", ">")),
    )
