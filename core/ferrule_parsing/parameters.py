"""Calls whose arguments stand one by one between tags, as XML has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any

from ferrule.forms import Fixed, Form, Json, OneOf, Regex, Repeated, Series, Until
from ferrule.structured_outputs.calls import EnforcedFunction
from ferrule_parsing import argument_schemas
from ferrule_parsing.calls import CallWriter
from ferrule_parsing.formats import CallReader, Schemas
from ferrule_parsing.heads import HeadedCall, HeadedReader, Spellings
from ferrule_parsing.json_object import ObjectReader
from ferrule_parsing.reader import Reader, Tags
from ferrule_parsing.tagged_values import ValueReader, ValueTags
from ferrule_parsing.typed_text import json_of

_LONGEST = 256  # characters of a key
_STRING = frozenset(("string",))
_LENGTHS = frozenset(("minLength", "maxLength"))
_ANY_KEY = Regex(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class Parameters(HeadedCall):
    """A call with a name, and for each argument `key` name `behind_key` value `end_value`; then `end`.

    Values of strings are written as they are, others as JSON. The schema says which; `behind_key` may have several
    spellings, of which each says so itself: True for strings, False for JSON, None for the schema. White space in the
    parts means nothing. `padding` is generated around values; if it is a line break, one at each end of a value means
    nothing. `gap` is generated between the parts of a call. `end` "": the call ends where no argument follows.
    `behind`: markup behind `end`. Unless a constraint writes them, values may hold such tags (see `ValueReader`), and
    with `unclosed` a value may also end in front of a line that begins with another argument, or ends the call.
    `quotes`: the quotes that may stand around a value; the first one ends a spelling of `behind_key`, and the value
    then ends at the second one in front of `end_value`. `undeclared_json`: arguments that the schema does not name are
    JSON where they look so, and not always strings.
    """

    key: str
    behind_key: tuple[tuple[str, bool | None], ...]
    end_value: str
    end: str = ""
    behind: str = ""
    padding: str = ""
    gap: str = "\n"
    unclosed: bool = True
    undeclared_json: bool = False
    quotes: tuple[str, str] = ("", "")

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.behind.split())

    def reader(self, schemas: Schemas, exact: frozenset[str], *, unmarked: bool) -> CallReader:
        return _ParametersReader(self, schemas, exact, frozenset(schemas) if unmarked else None)

    def form(self, function: EnforcedFunction) -> Form | None:
        head = self.head.form(function.name)
        each = [self._members(one) for one in argument_schemas.ways(function.schema)]
        ways = tuple(one for one in each if one is not None)
        if head is None or not ways or len(ways) < len(each):
            return None
        members = ways[0] if len(ways) == 1 else OneOf(ways)
        return Series((*head, Fixed(self.gap), members, *((Fixed(self.end + self.behind),) if self.end else ())))

    def _members(self, schema: dict[str, Any]) -> Form | None:
        found = argument_schemas.arguments(schema)
        if found is None:
            return None
        if not found and schema.get("additionalProperties") is not False:
            others = argument_schemas.others(schema)
            value = self._any() if others is None else self._argument(argument_schemas.Argument("", others, False))
            return None if value is None else Repeated(value, "", 0, None)
        forms = [(self._argument(one), one.required) for one in found]
        whole = [(form, required) for form, required in forms if form is not None]
        return argument_schemas.listed(whole, "") if len(whole) == len(forms) else None

    def _any(self) -> Form:
        behind = next((text for text, string in self.behind_key if string is not False), self.behind_key[0][0])
        return Series((Fixed(self.key), _ANY_KEY, Fixed(behind + self.padding), Until(self.end_value), Fixed(self.gap)))

    def _argument(self, argument: argument_schemas.Argument) -> Form | None:
        name, kinds = argument.name, argument_schemas.types(argument.schema)
        broken = name != name.strip() or any(end in name for end in _key_ends(self).texts)
        every = argument_schemas.options(argument.schema)
        if broken or len(name) > _LONGEST or every is None or ("string" in kinds and kinds & {"array", "object"}):
            return None
        values = [self._value(one) for one in _distinct(every)]
        whole = [value for value in values if value is not None]
        return (
            Series((Fixed(self.key), Fixed(name) if name else _ANY_KEY, OneOf(tuple(whole)), Fixed(self.gap)))
            if len(whole) == len(values)
            else None
        )

    def _value(self, schema: dict[str, Any]) -> Form | None:
        """Return the form of a value between what begins and what ends it. None when it might be read as something
        else.
        """
        kinds = argument_schemas.types(schema)
        string = not kinds or "string" in kinds
        behind = next(text for text, kind in self.behind_key if kind in (string, None))
        value = self._ended(schema)
        return None if value is None else Series((Fixed(behind + self.padding), value))

    def _ended(self, schema: dict[str, Any]) -> Form | None:
        kinds, demands = argument_schemas.types(schema), argument_schemas.keywords(schema)
        end = self.padding + self.end_value
        if kinds and "string" not in kinds:
            return Series((Json(schema), Fixed(end)))
        if demands <= {"type"}:
            return Until(self.end_value)
        if demands <= {"type", "enum"} or demands <= {"type", "const"}:
            values = schema.get("enum", [schema.get("const")])
            texts = [value for value in values if isinstance(value, str) and _plain(value, self.end_value)]
            return OneOf(tuple(Fixed(text + end) for text in texts)) if texts and kinds == {"string"} else None
        if demands <= {"type", "minLength", "maxLength"}:
            return Until(end, least=schema.get("minLength", 0), most=schema.get("maxLength"))
        return None


def _limited(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema limits the length of strings. Under a constraint such a value ends with the padding and
    the tag, and may hold the tag alone.
    """
    return not _LENGTHS.isdisjoint(schema)


def _distinct(schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the schemas, without those of limited strings where another schema allows any string."""
    free = any(argument_schemas.keywords(one) <= {"type"} and _is_string(one) for one in schemas)
    return [one for one in schemas if not (free and _limited(one) and _is_string(one))]


def _is_string(schema: Mapping[str, Any]) -> bool:
    return argument_schemas.types(schema) <= _STRING


def _plain(text: str, end: str) -> bool:
    """Return whether a string is read as it is written."""
    return end not in text and text == text.strip("\n")


class _ParametersReader(HeadedReader):
    def __init__(
        self, syntax: Parameters, schemas: Schemas, exact: frozenset[str], known: frozenset[str] | None
    ) -> None:
        super().__init__(syntax.head, known)
        self._syntax = syntax
        self._schemas = schemas
        self._exact_names = exact
        self._exact = False
        self._properties: Mapping[str, Any] = {}
        self._others: dict[str, Any] | None = None  # of arguments that it does not name
        self._definitions: dict[str, Any] = {}
        self._state = self._between
        self._given: set[str] = set()
        self._key = ""
        self._tags = _value_tags(syntax, (), ())
        self._end = syntax.end_value  # of a value that a constraint wrote
        self._values: ValueReader | None = None  # of the value that is being read
        self._behind_key = Spellings()
        self._kinds: frozenset[str] = frozenset()
        self._begun = False  # something of the value was read
        self._break = ""  # a line break at the end of what came of a value
        self._value: list[str] = []  # that is not handed on before it is whole
        self._nested: ObjectReader | None = None

    def read_arguments(self, reader: Reader, out: CallWriter) -> None:
        while not self.done and not self.failed and self._state(reader, out):
            pass

    def in_block(self, open: tuple[str, ...], close: tuple[str, ...]) -> None:
        self._tags = _value_tags(self._syntax, open, close)

    def resume(self, reader: Reader, out: CallWriter) -> bool:
        ended = self._values is not None and self._values.resume(reader)
        if ended:
            self._end_value(out)
        return ended

    def started(self, name: str) -> None:
        schema = self._schemas.get(name, {})
        self._exact = name in self._exact_names
        self._properties, self._others = argument_schemas.described(schema)
        self._definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

    # ---- states: whether the next one may have something to read

    def _between(self, reader: Reader, out: CallWriter) -> bool:
        """Read in front of an argument, or of the end."""
        if not reader.past_space():
            return False
        key = reader.take_any(_keys(self._syntax))
        end: bool | None = False
        if key == "":
            end = reader.take(self._syntax.end) if self._syntax.end else True
        if key:
            self._state = self._in_key
        elif end:
            self._close(out)
            self.done = True
        elif key == "" and end is False:
            self._fail(out)
        return bool(key)

    def _close(self, out: CallWriter) -> None:
        out.arguments("}" if self._given else "{}")

    def _fail(self, out: CallWriter, unread: str = "") -> None:
        self._close(out)
        self.unread = unread
        self.failed = True

    def _in_key(self, reader: Reader, out: CallWriter) -> bool:
        reader.space()
        ends = _key_ends(self._syntax)
        end = ends.find(reader.text, reader.at, reader.at + _LONGEST + ends.longest)
        if end is None and len(reader.text) - reader.at < _LONGEST + ends.longest:
            return False
        self._key = "" if end is None else reader.text[reader.at : end.start()].strip()
        if end is None or not self._key or self._key in self._given:
            self._fail(out, self._syntax.key)
            return False
        reader.at = end.start()
        self._behind_key = Spellings(*_spellings(self._syntax))
        self._state = self._behind
        return True

    def _behind(self, reader: Reader, out: CallWriter) -> bool:
        """Read between a key and its value."""
        spelling = self._behind_key.read(reader)
        if spelling is None and not self._behind_key.failed:
            return False
        # a key whose line ends without what belongs behind it has its value in the next one
        self._kinds = self._kinds_of(self._key, _spellings(self._syntax).get(spelling or ""))
        out.arguments((", " if self._given else "{") + encode_basestring(self._key) + ": ")
        self._given.add(self._key)
        self._begun, self._break, self._value, self._nested = False, "", [], None
        quoted = bool(self._syntax.quotes[0]) and (spelling or "").endswith(self._syntax.quotes[0])
        sure = self._exact or quoted
        self._values = None if sure else ValueReader(self._tags, self._given, self._properties)
        before = (
            self._syntax.quotes[1]
            if quoted
            else self._syntax.padding
            if self._exact and self._limits(self._key)
            else ""
        )
        self._end = before + self._syntax.end_value
        if self._kinds == _STRING:
            out.arguments('"')
        self._state = self._in_string if self._kinds == _STRING else self._in_value
        return True

    def _kinds_of(self, key: str, string: bool | None) -> frozenset[str]:
        """Return the JSON types that a value may have; empty for all."""
        if string:
            return _STRING
        schema = self._schema_of(key)
        undeclared = frozenset[str]() if self._syntax.undeclared_json else _STRING
        kinds = undeclared if schema is None else argument_schemas.types(schema)
        return kinds if string is None else kinds - _STRING

    def _limits(self, key: str) -> bool:
        """Return whether a constraint limits the length of a value."""
        return any(map(_limited, _distinct(argument_schemas.options(self._schema_of(key) or {}) or [])))

    def _schema_of(self, key: str) -> dict[str, Any] | None:
        schema = self._properties.get(key, self._others)
        return {**self._definitions, **schema} if isinstance(schema, dict) else None

    def _in_string(self, reader: Reader, out: CallWriter) -> bool:
        text, tag = self._until_end(reader)
        out.arguments(encode_basestring(text)[1:-1])
        if tag:
            self._end_value(out)
        return tag

    def _end_value(self, out: CallWriter) -> None:
        out.arguments('"' if self._kinds == _STRING else json_of("".join(self._value), self._kinds))
        self._values, self._state = None, self._between

    def _in_value(self, reader: Reader, out: CallWriter) -> bool:
        if self._exact and not self._begun and self._kinds and "string" not in self._kinds:
            if not reader.past_space():
                return False
            if reader.text[reader.at] in "[{":
                self._nested = ObjectReader()
                self._nested.feed('{"":')
            self._begun = True
        if self._nested is not None:
            return self._in_nested(self._nested, reader, out)
        text, tag = self._until_end(reader)
        self._value.append(text)
        if tag:
            self._end_value(out)
        return tag

    def _in_nested(self, nested: ObjectReader, reader: Reader, out: CallWriter) -> bool:
        """Read a JSON value that is sure to be right, so that the closing tag may stand in its strings."""
        reader.at = nested.feed(reader.text, reader.at)
        texts = nested.take()
        out.arguments("".join(part.text for part in texts))
        if not any(part.last for part in texts):
            return False
        self._nested, self._state = None, self._behind_nested
        return True

    def _behind_nested(self, reader: Reader, out: CallWriter) -> bool:
        _, tag = reader.until(_one_tag(self._syntax.end_value))
        if tag:
            self._state = self._between
        return bool(tag)

    def _until_end(self, reader: Reader) -> tuple[str, bool]:
        """Return (the next text of a value, whether the value ends with it), without the line breaks at the value's
        ends.
        """
        if self._values is None:
            text, tag = reader.until(_one_tag(self._end))
            ended = bool(tag)
        else:
            text, ended = self._values.read(reader)
        if not self._syntax.padding:
            return text, ended
        if not self._begun and text:
            self._begun = True
            text = text.removeprefix("\n")
        if self._end != self._syntax.end_value and self._values is None:
            return text, ended
        text = self._break + text
        self._break = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        return text, ended


@lru_cache(maxsize=64)
def _spellings(syntax: Parameters) -> dict[str, bool | None]:
    """Return the texts that may stand behind a key, and whether the value is a string: the first words of a spelling
    may be missing.
    """
    found = dict(syntax.behind_key)
    for text, string in syntax.behind_key:
        words = text.split()
        found |= {" ".join(words[at:]): string for at in range(1, len(words)) if words[at].startswith("<")}
    return found


@lru_cache(maxsize=64)
def _keys(syntax: Parameters) -> Tags:
    """Return the tags with which a key begins: the space in the tag may be missing."""
    return Tags(*{syntax.key, syntax.key.replace(" ", "")})


@lru_cache(maxsize=64)
def _key_ends(syntax: Parameters) -> Tags:
    return Tags("\n", *{text.split()[0] for text in _spellings(syntax)})


@lru_cache(maxsize=64)
def _value_tags(syntax: Parameters, open: tuple[str, ...], close: tuple[str, ...]) -> ValueTags:
    start, ends = syntax.head.start, tuple(filter(None, (syntax.end, *close)))
    return ValueTags(syntax.end_value, syntax.key, (start,) if start else open[:1], ends, syntax.unclosed)


@lru_cache(maxsize=64)
def _one_tag(text: str) -> Tags:
    return Tags(text)
