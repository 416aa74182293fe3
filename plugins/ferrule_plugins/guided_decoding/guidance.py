"""`guidance`: constraints by llguidance, which needs no compilation worth the name. https://github.com/guidance-ai/llguidance

A constraint becomes a grammar in the library's dialect of Lark, with JSON schemas inside.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, cast
from urllib.parse import quote

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from ferrule.forms import (
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
from ferrule.interfaces.guided_decoding import Grammar, GrammarBackend, Vocabulary
from ferrule_plugins.guided_decoding import spaces
from ferrule_plugins.guided_decoding.masks import Mask, Masks, TextGrammar
from ferrule_plugins.guided_decoding.patterns import FORMATS, without_sets
from ferrule_plugins.guided_decoding.schemas import closed, mapped, parts, rests, walk
from ferrule_plugins.guided_decoding.sources import foreign
from ferrule_plugins.guided_decoding.support import exact_numbers
from ferrule_plugins.guided_decoding.trial import Trial

_EXACT = 1 << 53  # up to this number each integer is a float
_LONGEST = 500  # characters of an error
_ANY = "/(?s:.*)/"
_OPTIONS = '%llguidance {"no_forcing": true}'  # text that must come may come in any tokens
_PLACE = re.compile(r"at (\d+)\((\d+)\): ")
_NAMES = re.compile(r"\^(?:\((?:\?:)?(?=[\w|-]*\)\$$))?(\w[\w-]*(?:\|\w[\w-]*)*)\)?\$")  # ^name$ and ^(name|other)$
_IN_REFERENCES = "%/#!$&'()*+,;=:@?-._~"  # what is not escaped
_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|\s+|[{}\[\]:,]|[^"\s{}\[\]:,]+|"', re.DOTALL)
# Of characters by their number, the library writes control characters alone: where a model began to write é as \\u00e9,
# it got another character. So none is begun, unless one stands in the schema.
_ESCAPES, _CONTROL = 'nrbtf\\"', "\\u00"
_UNKNOWN = ("Unimplemented", "Unsupported", "unsupported", "Unknown format", "not supported")
_LIMITS = llguidance.LLParserLimits(  # the states of one lexer may take 20 MiB, not 250
    max_lexer_states=20_000, initial_lexer_fuel=500_000, verbose_errors=False
)


class Guidance(GrammarBackend):
    auto_order = -3

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(vocabulary.stop_ids)
        )
        self._masks = Masks(vocabulary)
        self._trial = Trial(vocabulary)
        self._executor = llguidance.LLExecutor()

    def refuses(self, spec: GrammarSpec) -> str | None:
        """Return why the library cannot enforce the constraint: it reports keywords that it does not know. `$id` inside
        a schema misleads it.
        """
        for part in walk(spec.form):
            if isinstance(part, Rules) and (found := foreign(part.source)):
                return found
            if isinstance(part, Json) and (found := _numbers(part.schema)):
                return found
            if isinstance(part, Json) and any(
                "$id" in inner for inner in parts(part.schema) if inner is not part.schema
            ):
                return "keyword $id inside a schema"
        error = llguidance.LLMatcher.validate_grammar(_source(spec), self._tokenizer, limits=_LIMITS)
        return _plain(error) if any(mark in error for mark in _UNKNOWN) else None

    def compile(self, spec: GrammarSpec) -> bytes:
        source = _source(spec).encode()
        self._trial.follow(self.load(source))
        return source

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
    """A grammar of the library. The library knows one stop token and cannot go back over it, so it is not shown stop
    tokens.
    """

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


def _numbers(schema: Any) -> str | None:
    """Refuse numbers that the library reads with rounding errors."""
    return next(filter(None, (exact_numbers(part, _EXACT) for part in parts(schema))), None)


def _plain(error: str) -> str:
    """Return an error in one line, without the place in a grammar that the client did not write."""
    first, *rest = _PLACE.sub("", error.strip()).splitlines() or [""]
    reason = next((line.strip() for line in rest if line.startswith("error: ")), "")
    return f"{first} {reason}".strip()[:_LONGEST]


class _Tokens:
    """The vocabulary in the library's form. Forced text is split into bytes."""

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
    """Return the whole constraint as the library's grammar, JSON text. Raises ValueError."""
    writer = _Writer(spec)
    start = writer.write(spec.form)
    lark = "\n".join([_OPTIONS, f"start: {start}", *writer.rules])
    return json.dumps({"grammars": [{"name": "output", "lark_grammar": lark}, *writer.grammars]})


class _Writer:
    """A writer of forms as expressions, with the rules and grammars that these need."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._spec = spec
        self._numbers = count()
        self._beside_json = False  # whether a text may come in the place of JSON

    def write(self, form: Form) -> str:
        """Return an expression for a form."""
        match form:
            case Fixed(text) if self._beside_json and text:
                return f"({' '.join(map(_json_token, _JSON_TOKENS.findall(text)))})"
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
                before, self._beside_json = self._beside_json, self._beside_json or _some_json(options)
                found = f"({' | '.join(self.rule(option) for option in options)})"
                self._beside_json = before
                return found
            case Series(parts):
                return f"({' '.join(map(self.rule, parts))})"
            case Repeated():
                return self._repeated(form)
            case Until():
                return self._until(form)
            case Anything():
                return _ANY
            case Triggered():
                return self._triggered(form)

    def rule(self, form: Form) -> str:
        """Add a rule for a form and return its name."""
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
        found = mapped(mapped(found, _plain_keywords), _folded)
        options: dict[str, Any] = {"lenient": False, "whitespace_flexible": False}
        options["json_allowed_escapes"] = _ESCAPES + ("u" if _CONTROL in json.dumps(schema, ensure_ascii=False) else "")
        if space := spaces.pattern(self._spec, schema):
            options["whitespace_pattern"] = space
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

    def _until(self, form: Until) -> str:
        text, stops = _ANY, " | ".join(map(_quoted, (form.stop, *form.others)))
        if form.least or form.most is not None:
            text = f"/(?s:.{_count(form.least, form.most)})/"
        if form.without:
            text += f" & ~({_ANY} ({' | '.join(map(_quoted, form.without))}) {_ANY})"
        whole = f"({text}) ({stops})"
        if form.least:  # a stop that comes too early is one, too
            whole = f"({whole}) & ~(/(?s:.{_count(0, form.least - 1)})/ ({stops}) {_ANY})"
        return self.add(whole, "[lazy]")

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


def _some_json(options: Sequence[Form]) -> bool:
    """Return whether some of several forms begins with JSON, and not all of them.

    The library cuts a text into lexemes, the longest that it can. So a fixed text must have the same lexemes as JSON: a
    text that begins like both could only become the longer one.
    """
    return 0 < sum(map(_begins_with_json, options)) < len(options)


def _json_token(text: str) -> str:
    """Return the expression for a lexeme of a fixed text. White space may be left out, or the library would only look
    for that of JSON.
    """
    return _regex(f"(?:{text})?") if text.isspace() else _quoted(text)


def _begins_with_json(form: Form) -> bool:
    match form:
        case Json():
            return True
        case OneOf(options):
            return any(map(_begins_with_json, options))
        case Series((first, *_)) | Repeated(first):
            return _begins_with_json(first)
    return False


def _plain_keywords(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with patterns and references as the library reads them, and with patterns for formats of which it
    allows too much.
    """
    found = dict(schema)
    if isinstance(pattern := schema.get("pattern"), str):
        found["pattern"] = without_sets(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        found["patternProperties"] = {without_sets(pattern): value for pattern, value in patterns.items()}
    if isinstance(target := schema.get("$ref"), str):
        found["$ref"] = quote(target, _IN_REFERENCES)
    return _exact_format(found)


def _exact_format(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("format") not in ("date", "time", "date-time"):
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "format"}
    return {**rest, "allOf": [*schema.get("allOf", []), {"pattern": f"^({FORMATS[schema['format']]})$"}]}


def _folded(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove patterns of names that `properties` has: the library would look for further names, and find none."""
    named, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(named, dict) or not isinstance(patterns, dict):
        return schema
    named, rest = dict(named), {}
    for pattern, value in patterns.items():
        names = found[1].split("|") if (found := _NAMES.fullmatch(pattern)) else ()
        others = [name for name in names if name not in named]
        named |= {name: {"allOf": [named[name], value]} for name in dict.fromkeys(names) if name in named}
        if others or not names:
            rest[f"^(?:{'|'.join(others)})$" if others else pattern] = value
    return {**schema, "properties": named, "patternProperties": rest}


def _count(least: int, most: int | None) -> str:
    """Write how often a part of a pattern may be repeated. Raises ValueError."""
    if most is not None and most < least:
        raise ValueError(f"{least} to {most} characters")
    return f"{{{least},{'' if most is None else most}}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    """Write a pattern between slashes; it always matches as a whole."""
    return f"/{without_sets(pattern).replace(chr(10), chr(92) + 'n').replace('/', chr(92) + '/')}/"


def _lark(source: str) -> str:
    try:
        return str(any_to_lark(source))
    except RecursionError:
        raise
    except Exception as error:  # the library raises plain ones
        raise ValueError(f"the grammar is wrong: {_plain(str(error))}") from None
