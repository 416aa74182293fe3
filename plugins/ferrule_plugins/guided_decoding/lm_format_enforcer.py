"""`lm-format-enforcer`: constraints by LM Format Enforcer. https://github.com/noamgat/lm-format-enforcer

The library's parsers say which character may come next; tokens are followed character by character. It is written in
Python and needs no compilation. Tokens with half a character are never allowed, nor properties that a schema does not
name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from lmformatenforcer.characterlevelparser import (
    CharacterLevelParser,
    CharacterLevelParserConfig,
    SequenceParser,
    StringParser,
    UnionParser,
)
from lmformatenforcer.jsonschemaparser import JsonSchemaParser
from lmformatenforcer.regexparser import RegexParser

from ferrule.forms import Fixed, Form, GrammarSpec, Json, OneOf, Regex, Series
from ferrule.interfaces.guided_decoding import Grammar, GrammarBackend, Vocabulary
from ferrule_plugins.guided_decoding import spaces
from ferrule_plugins.guided_decoding.masks import Mask, Masks, TextGrammar, mask_of
from ferrule_plugins.guided_decoding.patterns import UnsupportedPattern, units, whole
from ferrule_plugins.guided_decoding.schemas import closed, mapped, walk
from ferrule_plugins.guided_decoding.support import (
    Support,
    described_contents,
    exact_formats,
    finite_patterns,
    matching_types,
    named_required,
    plain_values,
    said_type,
    simple_types,
    string_pattern,
    whole_pattern,
)

_LONGEST = 500  # characters of an error
_ESCAPED = re.compile(r"\\[ux]")
_SPACE = " \t\n\r"
_SPACES = 48  # in a row, at most: as many as the library's own limit


class LMFormatEnforcer(GrammarBackend):
    conformance = {"half_characters": False}

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._masks = Masks(vocabulary)
        self._tokens = _Tokens(vocabulary)

    def refuses(self, spec: GrammarSpec) -> str | None:
        for char in msgspec.json.encode(spec.form).decode():
            if char >= "\x80" and char not in self._tokens.alphabet:
                return f"the character {char!r}, which is not in one token"
        for part in walk(spec.form):
            match part:
                case Fixed() | OneOf() | Series():
                    pass
                case Regex(pattern) if _ESCAPED.search(pattern):
                    return "a character by its number in a pattern"
                case Regex(pattern):
                    try:
                        whole(pattern)
                    except UnsupportedPattern as error:
                        return str(error)
                case Json() if spec.whitespace_pattern is not None and spec.any_whitespace:
                    return "a pattern for white space"
                case Json(schema):
                    if found := _SUPPORT.refused(schema if spec.additional_properties else closed(schema)):
                        return found
                case _:
                    return f"form {type(part).__name__}"
        return None

    def compile(self, spec: GrammarSpec) -> bytes:
        data = msgspec.json.encode(spec)
        grammar = self._load(data)
        if not self._tokens.allowed(grammar.parser) and not grammar.may_end():
            raise ValueError("no text satisfies it")
        return data

    def load(self, data: bytes) -> Grammar:
        return self._load(data)

    def _load(self, data: bytes) -> LMFormatEnforcerGrammar:
        spec = msgspec.json.decode(data, type=GrammarSpec)
        try:
            parser = _parser(spec.form, spec, self._tokens.alphabet)
        except (RecursionError, MemoryError):
            raise
        except Exception as error:  # the library raises plain ones
            raise ValueError(str(error).strip().partition("\n")[0][:_LONGEST] or "it is wrong") from None
        return LMFormatEnforcerGrammar(self._tokens, self._masks, [parser])


class LMFormatEnforcerGrammar(TextGrammar):
    """A grammar of the library. `parsers`: the library's parsers, which do not change, after each token; the first is
    the one before all tokens.
    """

    def __init__(self, tokens: _Tokens, masks: Masks, parsers: list[CharacterLevelParser], stopped: int = 0) -> None:
        super().__init__(masks, stopped)
        self._tokens = tokens
        self._parsers = parsers

    @property
    def parser(self) -> CharacterLevelParser:
        return self._parsers[-1]

    def may_end(self) -> bool:
        return bool(self.parser.can_end())

    def fill_text(self, mask: Mask) -> None:
        mask[:] = mask_of(self._tokens.allowed(self.parser), len(mask))

    def follow(self, id: int) -> bool:
        parser = self.parser
        for char in self._tokens.texts.get(id, "\0"):
            if char not in parser.get_allowed_characters():
                return False
            parser = parser.add_character(char)
        self._parsers.append(parser)
        return True

    def take_back(self, count: int) -> None:
        del self._parsers[-count:]

    def fork(self) -> Grammar:
        return LMFormatEnforcerGrammar(self._tokens, self.masks, self._parsers.copy(), self.stopped)


class _Node:
    """Tokens with one beginning: those that are all of it, and those that go on."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.next: dict[str, _Node] = {}


class _Tokens:
    """The tokens that are whole characters, as a tree."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.texts: dict[int, str] = {}
        self._root = _Node()
        for id, token in enumerate(vocabulary.tokens[: vocabulary.size]):
            text = token.decode(errors="ignore")
            if token and text.encode() == token and id not in vocabulary.stop_ids:
                self.texts[id] = text
                node = self._root
                for char in text:
                    node = node.next.setdefault(char, _Node())
                node.ids.append(id)
        self.alphabet = "".join(sorted({char for text in self.texts.values() for char in text if char >= " "}))

    def allowed(self, parser: CharacterLevelParser) -> list[int]:
        return list(self._walk(parser, self._root))

    def _walk(self, parser: CharacterLevelParser, node: _Node) -> Iterator[int]:
        yield from node.ids
        if node.next:
            for char in node.next.keys() & set(parser.get_allowed_characters()):
                yield from self._walk(parser.add_character(char), node.next[char])


class _Strict(CharacterLevelParser):  # type: ignore[misc]  # the library has no types
    """The library's parser of JSON without its faults.

    The library allows a comma before a closing bracket, fractions and exponents in an integer, an exponent after a
    point, control characters in strings, and white space after the end. So exponents do not come, and -0 has no
    fraction.
    """

    def __init__(self, parser: CharacterLevelParser, space: re.Pattern[str], seen: _Seen) -> None:
        super().__init__()
        self._parser = parser
        self._space = space
        self._seen = seen

    def get_allowed_characters(self) -> str:
        found, seen = set(self._parser.get_allowed_characters()), self._seen
        if seen.inside:
            return "".join(char for char in found if char >= " ")
        if self._parser.can_end():
            found -= set(_SPACE)
        found -= {char for char in _SPACE if not self._space.fullmatch(seen.space + char)}
        if not seen.word.isalpha():
            found -= set("eE")
        if seen.word == "-0":
            found.discard(".")
        if seen.last == ",":
            found -= set("}]")
        return "".join(found)

    def add_character(self, new_character: str) -> CharacterLevelParser:
        return _Strict(self._parser.add_character(new_character), self._space, self._seen.after(new_character))

    def can_end(self) -> bool:
        return bool(self._parser.can_end())


class _Seen(msgspec.Struct, frozen=True):
    """The place of the last character in a JSON text."""

    last: str = ""  # the last one that is not white space
    word: str = ""  # the number or word that is being written
    space: str = ""  # white space after `last`
    inside: bool = False  # of a string
    escaped: bool = False  # the next character of the string is

    def after(self, char: str) -> _Seen:
        if self.inside:
            escaped = char == "\\" and not self.escaped
            return _Seen(char, inside=char != '"' or self.escaped, escaped=escaped)
        if char in _SPACE:
            return _Seen(self.last, space=self.space + char)
        return _Seen(char, self.word + char if char not in '{}[],:"' else "", inside=char == '"')


# ------------------------------------------------------------------------------------------------ parsers


def _parser(form: Form, spec: GrammarSpec, alphabet: str) -> CharacterLevelParser:
    """Return the library's parser of a form."""
    config = CharacterLevelParserConfig(
        alphabet=alphabet, max_consecutive_whitespaces=_SPACES, force_json_field_order=False, max_json_array_length=0
    )
    match form:
        case Fixed(text):
            return StringParser(text)
        case Regex(pattern):
            return RegexParser(whole(pattern), config)
        case OneOf(()):
            raise ValueError("a choice without options")
        case OneOf(options):
            return UnionParser([_parser(option, spec, alphabet) for option in options])
        case Series(parts):
            return SequenceParser([_parser(part, spec, alphabet) for part in parts])
        case Json(schema) if isinstance(schema, dict):
            found = mapped(schema if spec.additional_properties else closed(schema), whole_pattern)
            return _Strict(JsonSchemaParser(found, config), re.compile(spaces.pattern(spec, schema)), _Seen())
    raise ValueError(f"form {type(form).__name__}")


def _known_values(schema: dict[str, Any]) -> str | None:
    """Refuse values that the library writes otherwise than JSON: it writes them as Python does, and strings without
    escapes.
    """
    for value in (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())):
        plain = isinstance(value, str) and json.dumps(value, ensure_ascii=False) == f'"{value}"' and value
        if not plain:
            return "enum or const with other values than plain strings"
    if any(json.dumps(name, ensure_ascii=False) != f'"{name}"' or not name for name in schema.get("properties", {})):
        return "a property whose name needs an escape"
    return None


def _first_space(schema: dict[str, Any]) -> str | None:
    """Refuse strings that may begin with white space, which the library does not see there."""
    pattern = string_pattern(schema) or ""
    if _ESCAPED.search(schema.get("pattern", "")):
        return "a character by its number in a pattern"
    if any(unit not in "()|*+?{}" and re.fullmatch(unit, " ") for unit in units(pattern)):
        return "a pattern for white space"
    strings = (*schema.get("enum", ()), schema.get("const", ""), *schema.get("properties", {}))
    return "a string that begins with white space" if any(str(text)[:1].isspace() for text in strings) else None


def _root_definitions(schema: dict[str, Any]) -> str | None:
    """Refuse references to other places than definitions at the root: the library only reads the last part of a
    reference.
    """
    target = schema.get("$ref", "#/$defs/a")
    where = [part for part in ("#/$defs/", "#/definitions/") if target.startswith(part)]
    if not where or "/" in target.removeprefix(where[0]) or "~" in target or "%" in target:
        return f"$ref {target!r:.80}"
    return "both $defs and definitions" if {"$defs", "definitions"} <= set(schema) else None


def _no_empty_objects(schema: dict[str, Any]) -> str | None:
    """Refuse objects that name no property: the library does not check that their values are JSON."""
    if schema.get("properties") == {} and not isinstance(schema.get("additionalProperties"), dict):
        return "object without properties"
    return None


_SUPPORT = Support(
    any_value=False,
    keywords=frozenset(
        (
            *("type", "enum", "const", "$id", "pattern", "format", "items"),  # items are counted wrongly
            *("properties", "required", "additionalProperties"),
        )
    ),
    alone=frozenset(("$ref", "anyOf")),
    checks=(
        *(plain_values, matching_types, named_required, finite_patterns, exact_formats, said_type),
        *(simple_types, _known_values, _first_space, _root_definitions, described_contents, _no_empty_objects),
    ),
)
