"""`xgrammar`: constraints by XGrammar, which compiles them for a vocabulary. https://github.com/mlc-ai/xgrammar

A constraint becomes one structural tag. JSON schemas become grammars first, as text, in which two faults are mended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import xgrammar
from xgrammar.structural_tag import (
    AnyTextFormat,
    ConstStringFormat,
    DispatchFormat,
    Format,
    GrammarFormat,
    OptionalFormat,
    OrFormat,
    RepeatFormat,
    SequenceFormat,
    StructuralTag,
    TagFormat,
)

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
    Triggered,
    Until,
)
from ferrule.interfaces.guided_decoding import Grammar, GrammarBackend, Vocabulary
from ferrule_plugins.guided_decoding import spaces
from ferrule_plugins.guided_decoding.masks import Mask, Masks, TextGrammar
from ferrule_plugins.guided_decoding.patterns import UnsupportedPattern, whole
from ferrule_plugins.guided_decoding.schemas import closed, mapped, rests, walk
from ferrule_plugins.guided_decoding.sources import foreign
from ferrule_plugins.guided_decoding.support import (
    Support,
    disjoint_options,
    exact_formats,
    exact_numbers,
    finite_patterns,
    matching_types,
    named_required,
    plain_names,
    plain_references,
    plain_values,
    string_pattern,
    unique_count,
)
from ferrule_plugins.guided_decoding.trial import Trial

_LONGEST = 500  # characters of an error
_KNOWN_RULES = 64 << 20  # bytes
_MOST_TAGS = 64
_ALL = np.int32(-1)  # a mask of every token; the library may leave one that it finds to be so unwritten
_PLACE = re.compile(r"^\[[0-9:]+\] \S+:\d+: ")


class XGrammar(GrammarBackend):
    auto_order = -2

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        padding = vocabulary.size - len(vocabulary.tokens)
        self._tokens = xgrammar.TokenizerInfo(
            [*vocabulary.tokens[: vocabulary.size], *([b""] * padding)],
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.stop_ids),
        )
        self._masks = Masks(vocabulary)
        self._trial = Trial(vocabulary)
        self._batch = xgrammar.BatchGrammarMatcher("auto")

    @cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        """The library's compiler, which knows the masks of rules that it met before: those of most parts of a new
        schema.
        """
        return xgrammar.GrammarCompiler(self._tokens, max_threads=1, cache_limit_bytes=_KNOWN_RULES)

    def refuses(self, spec: GrammarSpec) -> str | None:
        for part in walk(spec.form):
            match part:
                case Json() if spec.whitespace_pattern is not None and spec.any_whitespace:
                    return "a pattern for white space"
                case Json(schema):
                    if found := _SUPPORT.refused(schema if spec.additional_properties else closed(schema)):
                        return found
                case Regex(pattern) if _LONG_NUMBER.search(pattern):
                    return _AMBIGUOUS
                case Regex(pattern):
                    try:
                        whole(pattern)
                    except UnsupportedPattern as error:
                        return str(error)
                case Rules(source):
                    if found := foreign(source):
                        return found
                case Triggered(most=int(most)) if most > _MOST_TAGS:
                    return f"more than {_MOST_TAGS} tags"
        return None

    def compile(self, spec: GrammarSpec) -> bytes:
        try:
            compiled = self._compiler.compile_structural_tag(StructuralTag(format=_format(spec.form, spec)))
        except RuntimeError as error:
            raise ValueError(_plain(error)) from None
        self._trial.follow(XGrammarGrammar(xgrammar.GrammarMatcher(compiled), self._masks))
        return compiled.serialize_json().encode()

    def load(self, data: bytes) -> Grammar:
        compiled = xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._tokens)
        return XGrammarGrammar(xgrammar.GrammarMatcher(compiled), self._masks)

    def fill(self, grammars: Sequence[Grammar], masks: np.ndarray[Any, Any]) -> None:
        ours = [cast(XGrammarGrammar, grammar) for grammar in grammars]
        rows = [row for row, grammar in enumerate(ours) if not grammar.stopped]
        masks[:] = _ALL
        if rows:
            self._batch.batch_fill_next_token_bitmask([ours[row].matcher for row in rows], masks, rows)
        for grammar, mask in zip(ours, masks, strict=True):
            if grammar.stopped:
                grammar.fill(mask)
            else:
                grammar.finish(mask)


class XGrammarGrammar(TextGrammar):
    """A grammar of the library, which would refuse everything after a stop token, so it is not shown stop tokens."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, masks: Masks, stopped: int = 0) -> None:
        super().__init__(masks, stopped)
        self.matcher = matcher

    def may_end(self) -> bool:
        return bool(self.matcher.is_completed())

    def fill_text(self, mask: Mask) -> None:
        mask[:] = _ALL
        self.matcher.fill_next_token_bitmask(mask)

    def follow(self, id: int) -> bool:
        return bool(self.matcher.accept_token(id))

    def take_back(self, count: int) -> None:
        self.matcher.rollback(count)

    def fork(self) -> Grammar:
        return XGrammarGrammar(self.matcher.fork(), self.masks, self.stopped)


def _plain(error: Exception) -> str:
    """Return the first line of an error without the time and the place in the library's source."""
    return _PLACE.sub("", str(error).strip()).partition("\n")[0][:_LONGEST]


# ------------------------------------------------------------------------------------------------ grammars


def _format(form: Form, spec: GrammarSpec) -> Format:
    """Return a form as the library's. Raises ValueError, RuntimeError."""
    match form:
        case Fixed(text):
            return ConstStringFormat(value=text)
        case Json(schema):
            return GrammarFormat(grammar=_json(schema, spec))
        case Regex(pattern):
            return _regex(whole(pattern))
        case Rules(source):
            return GrammarFormat(grammar=_rules(source))
        case OneOf(()):
            raise ValueError("a choice without options")
        case OneOf(options):
            return OrFormat(elements=[_format(option, spec) for option in options])
        case Series(parts):
            return SequenceFormat(elements=[_format(part, spec) for part in parts])
        case Repeated():
            return _repeated(form, _format(form.part, spec))
        case Until():
            return _until(form)
        case Anything():
            return AnyTextFormat()
        case Triggered():
            return _triggered(form, spec)


def _repeated(form: Repeated, part: Format) -> Format:
    if form.most is not None and form.most < max(form.least, 1):
        if form.most < form.least:
            raise ValueError(f"{form.least} to {form.most} repetitions")
        return ConstStringFormat(value="")
    again = SequenceFormat(elements=[ConstStringFormat(value=form.separator), part]) if form.separator else part
    most = -1 if form.most is None else form.most - 1
    whole = SequenceFormat(elements=[part, RepeatFormat(min=max(0, form.least - 1), max=most, content=again)])
    return whole if form.least else OptionalFormat(content=whole)


def _until(form: Until) -> Format:
    """Return the format of a text up to an end, where the library cannot count characters and look for an end at once.

    So none of the characters that are counted begins an end. But one may, where the next one does not continue the end:
    the two are counted as one, of which at most half as many may come.
    """
    stops = [form.stop, *form.others]
    if form.most is None and not form.least:
        return TagFormat(begin="", content=AnyTextFormat(excludes=list(form.without)), end=stops)
    if form.most is not None and form.most < form.least:
        raise ValueError(f"{form.least} to {form.most} characters")
    ends = (*stops, *form.without)
    begin, behind = {end[0] for end in ends}, {end[1] for end in ends if len(end) > 1}
    broken = begin - {end for end in ends if len(end) == 1}
    other = f"[^{_class(begin)}]"
    either = f"(?:{other}|[{_class(broken)}][^{_class(begin | behind)}])" if broken else other
    if form.most is None:
        return SequenceFormat(
            elements=[_regex(f"{either}{{{form.least}}}"), _until(Until(form.stop, form.others, form.without))]
        )
    texts = [_regex(f"{other}{{{form.least},{form.most}}}")]
    if form.least <= form.most // 2:
        texts.append(_regex(f"{either}{{{form.least},{form.most // 2}}}"))
    return SequenceFormat(
        elements=[OrFormat(elements=texts), OrFormat(elements=[ConstStringFormat(value=stop) for stop in stops])]
    )


def _regex(pattern: str) -> Format:
    return GrammarFormat(grammar=str(xgrammar.Grammar.from_regex(pattern)))


def _class(characters: set[str]) -> str:
    """Write characters as they stand inside the brackets of a pattern."""
    return "".join(
        f"\\u{ord(one):04x}" if one < " " else f"\\{one}" if one in r"\]^-[" else one for one in sorted(characters)
    )


def _triggered(form: Triggered, spec: GrammarSpec) -> Format:
    """Return a format with the rest of the tags behind each trigger. Where their number is limited, each contains what
    may come after it.
    """
    rules: list[tuple[str, Format]] = []
    for trigger, tags in rests(form).items():
        elements: list[Format] = []
        for tag in tags:
            begin, end = (ConstStringFormat(value=text) for text in (tag.begin, tag.end))
            elements.append(SequenceFormat(elements=[begin, _format(tag.content, spec), end]))
        rules.append((trigger, OrFormat(elements=elements)))
    if form.most is None:
        return DispatchFormat(rules=rules)
    found = DispatchFormat(rules=rules, loop=False)
    for _ in range(form.most - 1):
        again: list[tuple[str, Format]] = [(trigger, SequenceFormat(elements=[rest, found])) for trigger, rest in rules]
        found = DispatchFormat(rules=again, loop=False)
    return found


def _rules(source: str) -> str:
    grammar = xgrammar.Grammar.from_ebnf(source) if "::=" in source else xgrammar.Grammar.from_lark(source)
    return str(grammar)


def _json(schema: dict[str, Any] | bool, spec: GrammarSpec) -> str:
    """Return the library's grammar of a schema, with its faults mended."""
    if schema is False:
        raise ValueError("no value satisfies the schema false")
    found = schema if spec.additional_properties else closed(schema)
    patterns: list[str] = []

    def numbered(schema: dict[str, Any]) -> dict[str, Any]:
        """Replace a pattern with its number: the library's automata for patterns accept too much."""
        pattern = string_pattern(schema)
        if pattern is None:
            return schema
        patterns.append(pattern)
        rest = {keyword: value for keyword, value in schema.items() if keyword not in ("format", "pattern")}
        return {**rest, "pattern": f"pattern{len(patterns) - 1}_"}

    text = json.dumps(mapped(found, numbered))
    grammar = str(xgrammar.Grammar.from_json_schema(text, any_whitespace=True, strict_mode=False))
    grammar = _with_space(grammar, spec, schema)
    grammar = _LENGTH.sub("mended_character", grammar)
    grammar = _NAMES.sub(lambda rule: rule[0].replace("basic_escape", "mended_escape"), grammar)
    grammar = _PATTERN.sub(r"\1root", grammar)
    return "\n".join((grammar, _ADDED, *(_pattern_rules(number, pattern) for number, pattern in enumerate(patterns))))


def _with_space(grammar: str, spec: GrammarSpec, schema: Any) -> str:
    """Return the library's grammar, which has any white space, with the white space that the constraint allows."""
    if spec.any_whitespace and not spec.bounded_whitespace:
        return grammar
    rules = ['space_ ::= ""']
    if spec.any_whitespace:
        wide, deep = spaces.indentation(schema)
        begin = f'"" | " " | "\\n" blank_{wide} | "\\n" "\\t" tab_{deep - 1}'
        rules = [_before_token("space_", begin), _AFTER_SPACE]
        for name, char, most in (("blank", " ", wide), ("tab", "\\t", deep - 1)):
            rules.append(_before_token(f"{name}_0", '""'))
            rules += [_before_token(f"{name}_{at}", f'"" | "{char}" {name}_{at - 1}') for at in range(1, most + 1)]
    inside = _SPACE.sub(lambda found: "space_" if found[1] else found[0], grammar)
    return "\n".join((inside, *rules))


def _before_token(name: str, body: str) -> str:
    """Write a rule of white space, with what follows it, or the library keeps each token that begins with a space."""
    return f"{name} ::= ({body}) (=(after_space_))"


def _pattern_rules(number: int, pattern: str) -> str:
    """Return the rules of a pattern, with names of their own."""
    grammar = str(xgrammar.Grammar.from_regex(pattern))
    return _RULE.sub(lambda found: f"pattern{number}_{found[1]}" if found[1] else found[0], grammar)


# The library reads more digits than the two or four that belong to a character's number.
_LONG_NUMBER = re.compile(r"\\x[0-9a-fA-F]{3}|\\u[0-9a-fA-F]{5}")
_AMBIGUOUS = "a digit after the number of a character in a pattern"


def _short_numbers(schema: dict[str, Any]) -> str | None:
    return _AMBIGUOUS if _LONG_NUMBER.search(schema.get("pattern", "")) else None


def _known_numbers(schema: dict[str, Any]) -> str | None:
    return exact_numbers(schema, (1 << 63) - 1)


# White space, outside of texts and of what the library only looks ahead at.
_SPACE = re.compile(r'"(?:\\.|[^"\\])*"|\(=\(\[ \\n\\r\\t\]\*|(\[ \\n\\r\\t\]\*)')
_AFTER_SPACE = r'after_space_ ::= ["{}\[\],:\-0-9] | "true" | "false" | "null"'
# The library counts raw control characters, which JSON does not allow, and none that are escaped.
_LENGTH = re.compile(re.escape(r"[^\"\\\r\n]"))
_PATTERN = re.compile(r'Regex\("(pattern\d+_)", json_string=true\)')
_RULE = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\b(root\w*)')
# Properties that the schema does not name may have any other name, and an escape could spell one that it names.
_NAMES = re.compile(r"^\w+_addl_key(?:_\d+)? ::= .*$", re.MULTILINE)
_ADDED = r"""
mended_escape ::= ["\\bfnrt] | "u00" [01] [0-9a-fA-F]
mended_character ::= [^\0-\x1f"\\] | "\\" ["\\/bfnrt] | "\\u" mended_unit
mended_unit ::= mended_alone | [dD] [89abAB] mended_hex mended_hex "\\u" [dD] [c-fC-F] mended_hex mended_hex
mended_alone ::= [0-9a-cA-CefEF] mended_hex mended_hex mended_hex | [dD] [0-7] mended_hex mended_hex
mended_hex ::= [0-9a-fA-F]
"""

_SUPPORT = Support(
    keywords=frozenset(
        (
            *("type", "enum", "const", "$id"),
            *("minLength", "maxLength", "pattern", "format"),
            *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
            *("items", "prefixItems", "minItems", "maxItems"),
            *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
        )
    ),
    alone=frozenset(("$ref", "anyOf", "oneOf")),
    checks=(
        *(plain_references, plain_values, matching_types, disjoint_options, named_required),
        *(plain_names, unique_count, finite_patterns, exact_formats, _short_numbers, _known_numbers),
    ),
)
