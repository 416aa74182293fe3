"""`guidance`: constraints by llguidance, which needs no compilation worth the name. https://github.com/guidance-ai/llguidance

A constraint becomes a grammar in the library's dialect of Lark, with JSON schemas inside.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, cast

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from ferrule.interfaces.guided_decoding import Grammar, GrammarBackend, Vocabulary
from ferrule.types import (
    Anything,
    Fixed,
    Form,
    GrammarSpec,
    Json,
    OneOf,
    Regex,
    Repeated,
    Rules,
    Series,
    Tag,
    Triggered,
    Until,
)
from ferrule_plugins.guided_decoding.masks import Mask, Masks, TextGrammar
from ferrule_plugins.guided_decoding.patterns import FORMATS, whitespace
from ferrule_plugins.guided_decoding.schemas import SPACE, closed, mapped, parts, rests, walk
from ferrule_plugins.guided_decoding.sources import foreign

_TRIED = 4  # tokens of a text that `compile` generates: limits of the library may only show then
_LONGEST = 500  # characters of an error
_ANY = "/(?s:.*)/"
_OPTIONS = '%llguidance {"no_forcing": true}'  # text that must come may come in any tokens
_PLACE = re.compile(r"at (\d+)\((\d+)\): ")
_UNKNOWN = ("Unimplemented", "Unsupported", "unsupported", "Unknown format", "not supported")
_LIMITS = llguidance.LLParserLimits(  # the states of one lexer may take 20 MiB, not 250
    max_lexer_states=20_000, initial_lexer_fuel=500_000, verbose_errors=False
)


class Guidance(GrammarBackend):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(vocabulary.stop_ids)
        )
        self._masks = Masks(vocabulary)
        self._executor = llguidance.LLExecutor()

    def refuses(self, spec: GrammarSpec) -> str | None:
        """What the library says: it knows which keywords it does not know. `$id` inside a schema misleads it."""
        for part in walk(spec.form):
            if isinstance(part, Rules) and (found := foreign(part.source)):
                return found
            if isinstance(part, Json) and any(
                "$id" in inner for inner in parts(part.schema) if inner is not part.schema
            ):
                return "keyword $id inside a schema"
        error = llguidance.LLMatcher.validate_grammar(_source(spec), self._tokenizer, limits=_LIMITS)
        return _plain(error) if any(mark in error for mark in _UNKNOWN) else None

    def compile(self, spec: GrammarSpec) -> bytes:
        source = _source(spec)
        grammar, mask = self.load(source.encode()), np.zeros(self.vocabulary.words, np.int32)
        for step in range(_TRIED):
            grammar.fill(mask)
            if not mask.any():
                raise ValueError("no text satisfies it" if step == 0 else "some of its texts cannot be completed")
            word = int(mask.nonzero()[0][0])
            if not grammar.accept([32 * word + (int(mask[word]) & -int(mask[word])).bit_length() - 1]):
                raise ValueError("it is too complex")
        return source.encode()

    def load(self, data: bytes) -> Grammar:
        return GuidanceGrammar(self._matcher(data.decode()), self._masks)

    def fill(self, grammars: Sequence[Grammar], masks: np.ndarray[Any, Any]) -> None:
        ours = [cast(GuidanceGrammar, grammar) for grammar in grammars]
        matchers = [(grammar.matcher, row) for row, grammar in enumerate(ours) if not grammar.stopped]
        self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, 4 * masks.shape[1], len(masks))
        for grammar, mask in zip(ours, masks, strict=True):
            _check(grammar.matcher)
            if grammar.stopped:
                grammar.fill(mask)
            else:
                grammar.finish(mask)

    def _matcher(self, source: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        _check(matcher)
        return matcher


class GuidanceGrammar(TextGrammar):
    """The library knows one stop token and cannot go back over it, so it does not see them."""

    def __init__(self, matcher: llguidance.LLMatcher, masks: Masks, stopped: int = 0) -> None:
        super().__init__(masks, stopped)
        self.matcher = matcher

    def may_end(self) -> bool:
        return bool(self.matcher.is_accepting())

    def fill_text(self, mask: Mask) -> None:
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        _check(self.matcher)

    def follow(self, id: int) -> bool:
        followed = self.matcher.try_consume_tokens([id]) == 1
        _check(self.matcher)
        return bool(followed)

    def take_back(self, count: int) -> None:
        self.matcher.rollback(count)

    def fork(self) -> Grammar:
        return GuidanceGrammar(self.matcher.deep_copy(), self.masks, self.stopped)


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(_plain(matcher.get_error()))


def _plain(error: str) -> str:
    """An error in one line, without the place in a grammar that the client did not write."""
    first, *rest = _PLACE.sub("", error.strip()).splitlines() or [""]
    reason = next((line.strip() for line in rest if line.startswith("error: ")), "")
    return f"{first} {reason}".strip()[:_LONGEST]


class _Tokens:
    """The vocabulary as the library wants it. Forced text is split into bytes."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.stop_ids[0]
        padding = vocabulary.size - len(vocabulary.tokens)
        self.tokens = [*vocabulary.tokens[: vocabulary.size], *([b""] * padding)]
        self._bytes = {token: id for id, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._bytes[data[at : at + 1]] for at in range(len(data)) if data[at : at + 1] in self._bytes]


# ------------------------------------------------------------------------------------------------ grammars


def _source(spec: GrammarSpec) -> str:
    """The whole constraint as the library's grammar, JSON text. Raises ValueError."""
    writer = _Writer(spec)
    start = writer.write(spec.form)
    lark = "\n".join([_OPTIONS, f"start: {start}", *writer.rules])
    return json.dumps({"grammars": [{"name": "output", "lark_grammar": lark}, *writer.grammars]})


class _Writer:
    """Collects what a form needs beside the expression that stands for it."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._spec = spec
        self._numbers = count()

    def write(self, form: Form) -> str:
        """An expression for a form."""
        match form:
            case Fixed(text):
                return _quoted(text)
            case Json(schema):
                return f"%json {json.dumps(self._schema(schema))}"
            case Regex(pattern):
                return _regex(pattern)
            case Rules(source):
                name = f"rules{next(self._numbers)}"
                self.grammars.append({"name": name, "lark_grammar": _lark(source)})
                return f"@{name}"
            case OneOf(()):
                raise ValueError("a choice without options")
            case OneOf(options):
                return f"({' | '.join(self.rule(option) for option in options)})"
            case Series(parts):
                return f"({' '.join(map(self.rule, parts))})"
            case Repeated():
                return self._repeated(form)
            case Until(stop, others, without):
                text = f"{_ANY} & ~({_ANY} ({' | '.join(map(_quoted, without))}) {_ANY})" if without else _ANY
                return self.add(f"({text}) ({' | '.join(map(_quoted, (stop, *others)))})", "[lazy]")
            case Anything():
                return _ANY
            case Triggered():
                return self._triggered(form)

    def rule(self, form: Form) -> str:
        """The name of a rule for a form."""
        return self.add(self.write(form))

    def add(self, expression: str, attributes: str = "") -> str:
        name = f"part{next(self._numbers)}"
        self.rules.append(f"{name}{attributes}: {expression}")
        return name

    def _schema(self, schema: dict[str, Any] | bool) -> dict[str, Any]:
        if schema is False:
            raise ValueError("no value satisfies the schema false")
        found = dict(schema) if isinstance(schema, dict) else {}
        if not self._spec.additional_properties:
            found = closed(found)
        found = mapped(found, _exact_format)
        options: dict[str, Any] = {"lenient": False, "whitespace_flexible": self._spec.any_whitespace}
        if self._spec.any_whitespace:
            given = self._spec.whitespace_pattern
            options["whitespace_pattern"] = SPACE if given is None else whitespace(given)
        return {**found, "x-guidance": options}

    def _repeated(self, form: Repeated) -> str:
        if form.most == 0:
            return '""'
        part = whole = self.rule(form.part)
        if form.most != 1:
            again = self.add(f"{_quoted(form.separator)} {part}" if form.separator else part)
            most = "" if form.most is None else str(form.most - 1)
            whole = f"({part} {again}{{{max(0, form.least - 1)},{most}}})"
        return whole if form.least else f"{whole}?"

    def _triggered(self, form: Triggered) -> str:
        each: list[str] = []
        for trigger, tags_behind in rests(form).items():
            text = self.add(f"{_ANY} {_quoted(trigger)}", "[lazy]")  # of several, the first that stands in the text
            each += [self.add(f"{text} {self._inside(tag)}") for tag in tags_behind]
        tags = " | ".join(each)
        if form.most is None:
            return f"(({tags})* {_ANY})"
        before = f"({tags}){{0,{form.most - 1}}}" if form.most > 1 else ""
        return f"({before} {_ANY} | {before} ({tags}))"

    def _inside(self, tag: Tag) -> str:
        parts: Iterator[str] = (_quoted(text) if text else "" for text in (tag.begin, tag.end))
        return f"{next(parts)} {self.rule(tag.content)} {next(parts)}"


def _exact_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Formats of which the library allows too much become patterns."""
    if schema.get("format") not in ("date", "time", "date-time"):
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "format"}
    return {**rest, "allOf": [*schema.get("allOf", []), {"pattern": f"^({FORMATS[schema['format']]})$"}]}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    """A pattern between slashes; it always matches as a whole."""
    return f"/{pattern.replace(chr(10), chr(92) + 'n').replace('/', chr(92) + '/')}/"


def _lark(source: str) -> str:
    try:
        return str(any_to_lark(source))
    except RecursionError:
        raise
    except Exception as error:  # the library raises plain ones
        raise ValueError(f"the grammar is wrong: {_plain(str(error))}") from None
