"""What output may look like, as a tree: a guided-decoding backend compiles it. Texts are those that the client sees."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Fixed(Struct, frozen=True, tag="fixed"):
    """Exactly this text."""

    text: str


class Json(Struct, frozen=True, tag="json"):
    """A JSON value that is valid for a schema (draft 2020-12); True: any value."""

    schema: dict[str, Any] | bool


class Regex(Struct, frozen=True, tag="regex"):
    """A text that the whole pattern matches."""

    pattern: str


class Rules(Struct, frozen=True, tag="rules"):
    """A text of a context-free grammar, in Lark's syntax or in EBNF (GBNF, with a rule `root`)."""

    source: str


class OneOf(Struct, frozen=True, tag="one_of"):
    """One of several."""

    options: tuple[Form, ...]


class Series(Struct, frozen=True, tag="series"):
    """One after the other."""

    parts: tuple[Form, ...]


class Repeated(Struct, frozen=True, tag="repeated"):
    """The same again, `least` times or more, at most `most` times."""

    part: Form
    separator: str = ""
    least: int = 0
    most: int | None = None


class Until(Struct, frozen=True, tag="until"):
    """Any text up to the first of `stop` and `others`, with `least` to `most` characters and no `without` before it."""

    stop: str
    others: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None


class Anything(Struct, frozen=True, tag="anything"):
    """Any text."""


class Tag(Struct, frozen=True):
    """A part of a text: what it begins with, what is inside, what it ends with."""

    begin: str
    content: Form
    end: str = ""


class Triggered(Struct, frozen=True, tag="triggered"):
    """Any text, in which each of the `triggers` is the beginning of one of `tags`. Each tag begins with one of them.
    No trigger begins with another one. `most`: so many tags, behind which the text ends; None: any number."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    most: int | None = None


Form = Fixed | Json | Regex | Rules | OneOf | Series | Repeated | Until | Anything | Triggered


class GrammarSpec(Struct, frozen=True, kw_only=True):
    """A constraint on the output. `backend` None: the server's. `fallback`: others may enforce what it cannot.

    The rest is about JSON: white space (bounded: as formatted JSON has it), and properties that a schema does not name.
    """

    form: Form
    backend: str | None = None
    fallback: bool = True
    any_whitespace: bool = True
    whitespace_pattern: str | None = None
    bounded_whitespace: bool = True
    additional_properties: bool = True
