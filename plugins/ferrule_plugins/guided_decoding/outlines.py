"""`outlines`: constraints as regular expressions, by outlines-core. https://github.com/dottxt-ai/outlines-core

Every form becomes one regular expression, and the library's index of it says which tokens may come in each state.
Properties that a schema does not name are never written.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import outlines_core
from outlines_core import json_schema

from ferrule.forms import Fixed, Form, GrammarSpec, Json, OneOf, Regex, Repeated, Series
from ferrule.interfaces.guided_decoding import Grammar, GrammarBackend, Vocabulary
from ferrule_plugins.guided_decoding import spaces
from ferrule_plugins.guided_decoding.masks import Mask, Masks, TextGrammar, mask_of
from ferrule_plugins.guided_decoding.patterns import CHARACTER, UnsupportedPattern, whole, without_sets
from ferrule_plugins.guided_decoding.schemas import closed, mapped, walk
from ferrule_plugins.guided_decoding.support import (
    CLAIMS,
    Support,
    circular,
    described_contents,
    disjoint_options,
    exact_formats,
    finite_patterns,
    matching_types,
    named_required,
    ordered_bounds,
    plain_references,
    plain_values,
    said_type,
    simple_types,
    whole_pattern,
)

_LONGEST = 500  # characters of an error
_MOST_MASKS = 256  # of a grammar, kept
_SPECIAL = re.compile(r"[\\.^$*+?()\[\]{}|]")


class Outlines(GrammarBackend):
    auto_order = -1

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        ids: dict[bytes, list[int]] = {}
        for id, token in enumerate(vocabulary.tokens[: vocabulary.size]):
            if token and id not in vocabulary.stop_ids:
                ids.setdefault(token, []).append(id)
        self._tokens = outlines_core.Vocabulary(vocabulary.stop_ids[0], ids)
        self._masks = Masks(vocabulary)

    def refuses(self, spec: GrammarSpec) -> str | None:
        for part in walk(spec.form):
            match part:
                case Fixed() | OneOf() | Series() | Repeated():
                    pass
                case Regex(pattern):
                    try:
                        whole(pattern)
                    except UnsupportedPattern as error:
                        return str(error)
                case Json(schema):
                    found = _SUPPORT.refused(schema if spec.additional_properties else closed(schema))
                    if found := found or circular(schema):
                        return found
                case _:
                    return f"form {type(part).__name__}, which is not a regular expression"
        return "a text that may be empty" if _may_be_empty(spec.form) else None

    def compile(self, spec: GrammarSpec) -> bytes:
        try:  # with an end that is looked for, "a|ab" is not done after an a
            index = outlines_core.Index(f"{_regex(spec.form, spec)}\\z", self._tokens)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(str(error).strip().partition("\n")[0][:_LONGEST]) from None
        return bytes(index.__reduce__()[1][0])

    def load(self, data: bytes) -> Grammar:
        index = _Index(outlines_core.Index.from_binary(list(data)), self.vocabulary.words)
        return OutlinesGrammar(index, self._masks, [index.index.get_initial_state()])


class _Index:
    """The library's index and masks of its states."""

    def __init__(self, index: outlines_core.Index, words: int) -> None:
        self.index = index
        self._words = words
        self._masks: dict[int, Mask] = {}

    def mask(self, state: int) -> Mask:
        found = self._masks.get(state)
        if found is None:
            if len(self._masks) >= _MOST_MASKS:
                self._masks.pop(next(iter(self._masks)))
            found = self._masks[state] = mask_of(self.index.get_allowed_tokens(state) or (), self._words)
        return found


class OutlinesGrammar(TextGrammar):
    """A grammar of the library. `states`: the state of the text after each token, the first one before all tokens."""

    def __init__(self, index: _Index, masks: Masks, states: list[int], stopped: int = 0) -> None:
        super().__init__(masks, stopped)
        self._index = index
        self._states = states

    def may_end(self) -> bool:
        return bool(self._index.index.is_final_state(self._states[-1]))

    def fill_text(self, mask: Mask) -> None:
        np.copyto(mask, self._index.mask(self._states[-1]))

    def follow(self, id: int) -> bool:
        state = self._index.index.get_next_state(self._states[-1], id)
        if state is not None:
            self._states.append(state)
        return state is not None

    def take_back(self, count: int) -> None:
        del self._states[-count:]

    def fork(self) -> Grammar:
        return OutlinesGrammar(self._index, self.masks, self._states.copy(), self.stopped)


def _may_be_empty(form: Form) -> bool:
    """Return whether a form may be an empty text, with which the library's index cannot begin."""
    match form:
        case Fixed(text):
            return not text
        case Regex(pattern):
            try:
                return re.fullmatch(whole(pattern), "") is not None
            except re.error:
                return False
        case OneOf(options):
            return any(map(_may_be_empty, options))
        case Series(parts):
            return all(map(_may_be_empty, parts))
        case Repeated(part, separator, least, most):
            return least == 0 or most == 0 or (_may_be_empty(part) and (least == 1 or not separator))
    return False


# ------------------------------------------------------------------------------------------------ expressions


def _regex(form: Form, spec: GrammarSpec) -> str:
    """Return a form as a regular expression in brackets. Raises ValueError."""
    match form:
        case Fixed(text):
            return f"(?:{_SPECIAL.sub(lambda char: chr(92) + char[0], text)})"
        case Regex(pattern):
            return f"(?:{without_sets(whole(pattern))})"
        case Json(schema):
            return f"(?:{_json(schema, spec)})"
        case OneOf(()):
            raise ValueError("a choice without options")
        case OneOf(options):
            return f"(?:{'|'.join(_regex(option, spec) for option in options)})"
        case Series(parts):
            return f"(?:{''.join(_regex(part, spec) for part in parts)})"
        case Repeated():
            return _repeated(form, spec)
    raise ValueError(f"{type(form).__name__} is not a regular expression")


def _repeated(form: Repeated, spec: GrammarSpec) -> str:
    if form.most is not None and form.most < form.least:
        raise ValueError(f"{form.least} to {form.most} repetitions")
    if form.most == 0:
        return "(?:)"
    part, separator = _regex(form.part, spec), _regex(Fixed(form.separator), spec)
    most = "" if form.most is None else form.most - 1
    whole = f"(?:{part}(?:{separator}{part}){{{max(0, form.least - 1)},{most}}})"
    return whole if form.least else f"{whole}?"


def _json(schema: dict[str, Any] | bool, spec: GrammarSpec) -> str:
    if isinstance(schema, bool):
        raise ValueError(f"the schema {schema} is not a regular expression")
    found = mapped(schema if spec.additional_properties else closed(schema), _whole_pattern)
    return str(json_schema.build_regex_from_schema(json.dumps(found), spaces.pattern(spec, schema)))


def _whole_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with the pattern of its strings. The library's own pattern has no characters by their
    number.
    """
    found = whole_pattern(schema)
    if found.get("type") == "string" and CLAIMS.intersection(found) <= {"type", "minLength", "maxLength", "$id"}:
        count = f"{{{found.pop('minLength', 0)},{found.pop('maxLength', '')}}}"
        return {**found, "pattern": f"^{CHARACTER}{count}$"}
    return {**found, "pattern": without_sets(found["pattern"])} if "pattern" in found else found


_SUPPORT = Support(
    any_value=False,
    keywords=frozenset(
        (
            *("type", "enum", "const", "$id", "minLength", "maxLength", "pattern", "format"),
            *("items", "minItems", "maxItems", "properties", "required", "additionalProperties"),
        )
    ),
    alone=frozenset(("$ref", "anyOf", "oneOf")),
    checks=(
        *(plain_references, plain_values, matching_types, disjoint_options, named_required, ordered_bounds),
        *(finite_patterns, exact_formats, said_type, simple_types, described_contents),
    ),
)
