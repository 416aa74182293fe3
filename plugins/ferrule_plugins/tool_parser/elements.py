"""Reads the arguments of a call that are elements, nested as their values are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from json.encoder import encode_basestring
from typing import Any, NamedTuple

from ferrule_parsing import CallHead, CallWriter, ObjectReader, Reader, Tags, argument_schemas
from ferrule_parsing.formats import Schemas
from ferrule_parsing.heads import HeadedReader
from ferrule_parsing.typed_text import json_of, kind_of

DEEPEST = 64  # levels of elements in elements
CONTAINERS = frozenset(("array", "object"))
_STRING = frozenset(("string",))
_TAG = re.compile(r"\s{0,16}<(/?)([^<>]{1,256})>")
_BEGUN = re.compile(r"\s{0,16}(?:<[^<>]{0,257})?\Z")


class _Tag(NamedTuple):
    closes: bool
    name: str  # "": what stands here is not a tag


@dataclass(frozen=True)
class Markup:
    """The tags of a format. `prefix`: the text in front of each tag. `call`, `block`: the names of the tags around a
    call, and around all calls. `entry`: the name of a list's elements.
    """

    prefix: str
    block: str
    call: str
    entry: str

    def outside(self, name: str) -> bool:
        """Return whether a tag is one of those around calls."""
        return name in (self.block, self.call) or name.startswith(f"{self.call} ")

    def take(self, reader: Reader) -> _Tag | None:
        """Read the tag that stands here. None, with nothing read: more text is needed to decide."""
        start = reader.at
        prefix = reader.take(self.prefix)
        if not prefix:
            return None if prefix is None else _Tag(False, "")
        found = _TAG.match(reader.text, reader.at)
        name = found[2].strip() if found else ""
        if found is None or not name:
            undecided = found is None and _BEGUN.match(reader.text, reader.at)
            reader.at = start
            return None if undecided else _Tag(False, "")
        reader.at = found.end()
        return _Tag(bool(found[1]), name)


class Shape:
    """A schema's claims about a value and the values in it, looked up as far as they are asked for. None: no claim."""

    def __init__(self, schema: Mapping[str, Any] | None, definitions: Mapping[str, Any]) -> None:
        self._schema = {**definitions, **(schema or {})}
        self._definitions = {**definitions, **argument_schemas.definitions(self._schema)}
        self._members: dict[str, Shape] = {}
        self.kinds = _STRING if schema is None else argument_schemas.types(self._schema)

    @property
    def is_open(self) -> bool:
        """Whether any member may stand in such an object, as far as the schema says."""
        return not self._described[0] or self._described[1] is not None

    def declares(self, name: str) -> bool:
        return name in self._described[0]

    def member(self, name: str) -> Shape:
        named, others = self._described
        if name not in named:
            return self._other
        if name not in self._members:
            self._members[name] = Shape(named[name], self._definitions)
        return self._members[name]

    @cached_property
    def entry(self) -> Shape:
        return Shape(argument_schemas.entries(self._schema), self._definitions)

    @cached_property
    def _other(self) -> Shape:
        return Shape(self._described[1], self._definitions)

    @cached_property
    def _described(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        return argument_schemas.described(self._schema)


@dataclass
class _Open:
    """An object or list that is being read. `repeats`: a list of which each entry has the name of the whole."""

    name: str
    shape: Shape
    is_list: bool
    repeats: bool = False
    empty: bool = True
    given: set[str] = field(default_factory=set)


class _Nesting:
    """Objects and lists that are open, from the arguments as a whole to the innermost, and how they are written."""

    def __init__(self, markup: Markup, arguments: Shape) -> None:
        self._markup = markup
        self._open = [_Open("", arguments, is_list=False)]
        self._muted: int | None = None  # a member that came before is being read, in so many open ones

    @property
    def too_deep(self) -> bool:
        return len(self._open) > DEEPEST

    def begin(self, name: str, out: CallWriter) -> Shape:
        """Write what belongs in front of the value of an element, and return the value's shape."""
        self.close(self._place(name) + 1, out)
        around = self._open[-1]
        again = not around.is_list and name in around.given
        if again and self._muted is None:
            self._muted = len(self._open)
        if not again:
            key = "" if around.is_list else encode_basestring(name) + ": "
            self.say(("" if around.empty else ", ") + key, out)
            around.empty = False
            around.given.add(name)
        return around.shape.entry if around.is_list else around.shape.member(name)

    def enter(self, name: str, shape: Shape, is_list: bool, out: CallWriter) -> None:
        """Begin a value that is an object or a list."""
        self.say("[" if is_list else "{", out)
        self._open.append(_Open(name, shape, is_list))

    def repeat(self, name: str, shape: Shape, first: str, out: CallWriter) -> None:
        """Begin a list with a first entry; others may follow in elements of the same name."""
        self.say("[" + first, out)
        self._open.append(_Open(name, shape, is_list=True, repeats=True, empty=False))

    def ended(self) -> None:
        """End a value."""
        if self._muted == len(self._open):
            self._muted = None

    def close(self, down_to: int, out: CallWriter) -> None:
        """Close the open objects and lists, all but the outer `down_to` ones."""
        while len(self._open) > down_to:
            self.say("]" if self._open.pop().is_list else "}", out)
            self.ended()

    def find(self, name: str) -> int:
        """Return the place of the innermost element of this name. 0: there is none."""
        return next((at for at in range(len(self._open) - 1, 0, -1) if self._open[at].name == name), 0)

    def ends_call(self, tag: _Tag) -> bool:
        """Return whether an opening tag begins another call, or a block of them."""
        return self._markup.outside(tag.name) and not (tag.closes or self._open[-1].shape.declares(tag.name))

    def ends_text(self, tag: _Tag) -> bool:
        """Return whether a tag in a text ends it, though it is not the text's own."""
        if tag.closes:
            return bool(self.find(tag.name)) or self._markup.outside(tag.name)
        around = self._open[-1]
        known = around.is_list or around.shape.declares(tag.name)
        return (known and self._expects(around, tag.name)) or self.ends_call(tag)

    def say(self, text: str, out: CallWriter) -> None:
        if self._muted is None:
            out.arguments(text)

    def _place(self, name: str) -> int:
        """Return the place that an element belongs to: an outer element, whose closing tag is missing, if only that one
        knows the name.
        """
        for at in range(len(self._open) - 1, -1, -1):
            if self._expects(self._open[at], name):
                return at
        return len(self._open) - 1 - self._open[-1].repeats

    def _expects(self, around: _Open, name: str) -> bool:
        if around.is_list:
            return name == (around.name if around.repeats else self._markup.entry)
        fits = around is self._open[-1] and around.shape.is_open
        return fits or (around.shape.declares(name) and name not in around.given)


class ElementsReader(HeadedReader):
    """A reader of one call. Values stream once their kind is known: strings as they come, objects and lists member by
    member.

    An element that begins with another element is a list if its schema says so, or if it says nothing and the first one
    is an entry; otherwise an object. Of members that come twice the first counts, but where the schema says list, they
    are its entries. A missing closing tag is made up for where an outer one, another call, or what belongs to an outer
    element follows. `exact`: functions whose arguments a constraint wrote, so that JSON in them is right and may hold
    any text.
    """

    def __init__(self, head: CallHead, markup: Markup, schemas: Schemas, exact: frozenset[str]) -> None:
        super().__init__(head, None)
        self._markup = markup
        self._schemas = schemas
        self._exact_names = exact
        self._exact = False
        self._open: _Nesting  # of the call whose name was read
        self._state: Callable[[Reader, CallWriter], bool] = self._between
        self._name, self._shape = "", Shape(None, {})  # of the value that is being read
        self._text: list[str] = []  # of the value, that is not handed on yet
        self._json = ObjectReader()

    def started(self, name: str) -> None:
        self._exact = name in self._exact_names
        self._open = _Nesting(self._markup, Shape(self._schemas.get(name, {}), {}))

    def start(self, name: str, id: str | None, out: CallWriter) -> None:
        super().start(name, id, out)
        out.arguments("{")

    def read_arguments(self, reader: Reader, out: CallWriter) -> None:
        while not self.done and not self.failed and self._state(reader, out):
            pass

    # ---- states: whether the next one may have something to read

    def _between(self, reader: Reader, out: CallWriter) -> bool:
        """Read in an object or a list, before or behind an element."""
        if not reader.past_space():
            return False
        start = reader.at
        tag = self._markup.take(reader)
        if tag is None:
            return False
        if tag.closes:
            self._close_named(tag.name, reader, start, out)
        elif self._open.ends_call(tag):
            reader.at = start
            self._end(out)
        elif not tag.name or self._open.too_deep:
            self._open.close(0, out)
            self.failed = True
        else:
            self._name, self._text = tag.name, []
            self._shape = self._open.begin(tag.name, out)
            self._state = self._at_value
        return True

    def _close_named(self, name: str, reader: Reader, start: int, out: CallWriter) -> None:
        """Read a closing tag. A tag that closes nothing is ignored."""
        found = self._open.find(name)
        if found:
            self._open.close(found, out)
        elif self._markup.outside(name):
            if name == self._markup.block:
                reader.at = start
            self._end(out)

    def _at_value(self, reader: Reader, out: CallWriter) -> bool:
        """Read the start of a value, which decides its kind."""
        self._text.append(reader.space())
        if reader.empty:
            return False
        start, kinds = reader.at, self._shape.kinds
        tag = self._markup.take(reader)
        if tag is None:
            return False
        reader.at = start
        if tag.name and not tag.closes and not self._open.ends_call(tag):
            said = kinds & CONTAINERS
            is_list = "array" in said if len(said) == 1 else tag.name == self._markup.entry
            self._open.enter(self._name, self._shape, is_list, out)
            self._state = self._between
        elif self._exact and reader.text[start] in "[{" and kinds and "string" not in kinds:
            self._json = ObjectReader()
            self._json.feed('{"":')
            self._state = self._in_json
        else:
            if kinds == _STRING:
                self._open.say('"' + encode_basestring("".join(self._text))[1:-1], out)
            self._state = self._in_text
        return True

    def _in_text(self, reader: Reader, out: CallWriter) -> bool:
        text, prefix = reader.until(_prefix(self._markup.prefix))
        self._add(text, out)
        if not prefix:
            return False
        start = reader.at - len(prefix)
        reader.at = start
        tag = self._markup.take(reader)
        if tag is None:
            return False
        if tag == (True, self._name) or self._open.ends_text(tag):
            reader.at = reader.at if tag == (True, self._name) else start
            self._end_value(out)
        else:
            reader.at = start + len(prefix)
            self._add(prefix, out)
        return True

    def _in_json(self, reader: Reader, out: CallWriter) -> bool:
        """Read JSON that is sure to be right, so that any tag may stand in its strings."""
        reader.at = self._json.feed(reader.text, reader.at)
        texts = self._json.take()
        self._open.say("".join(part.text for part in texts), out)
        if not any(part.last for part in texts):
            return False
        self._state = self._behind_json
        return True

    def _behind_json(self, reader: Reader, out: CallWriter) -> bool:
        if not reader.past_space() or self._markup.take(reader) is None:
            return False
        self._open.ended()
        self._state = self._between
        return True

    # ---- parts

    def _add(self, text: str, out: CallWriter) -> None:
        """Add text to a value."""
        if self._shape.kinds == _STRING:
            self._open.say(encode_basestring(text)[1:-1], out)
        else:
            self._text.append(text)

    def _end_value(self, out: CallWriter) -> None:
        """End a value that is a text."""
        text, kinds = "".join(self._text), self._shape.kinds
        self._state = self._between
        if kinds == _STRING:
            self._open.say('"', out)
        elif "string" not in kinds and kinds & CONTAINERS and not text.strip():
            self._open.say("[]" if "array" in kinds else "{}", out)
        else:
            value = json_of(text, kinds)
            if "array" in kinds and "string" not in kinds and kind_of(value) not in kinds:
                self._open.repeat(self._name, self._shape, json_of(text, self._shape.entry.kinds), out)
                return
            self._open.say(value, out)
        self._open.ended()

    def _end(self, out: CallWriter) -> None:
        self._open.close(0, out)
        self.done = True


@lru_cache(maxsize=16)
def _prefix(text: str) -> Tags:
    return Tags(text)
