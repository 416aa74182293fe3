"""The kit of guided decoding: a small backend keeps every promise, and each planted fault breaks one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ferrule.forms import Fixed, Form, GrammarSpec, Json, OneOf, Repeated, Series
from ferrule.interfaces.guided_decoding import Grammar, GrammarBackend, Vocabulary
from ferrule_testkit.kits import GuidedDecodingKit
from ferrule_testkit.kits.run import run_kit


class Listed(GrammarBackend):
    """A backend for forms that have few texts, which are listed."""

    def refuses(self, spec: GrammarSpec) -> str | None:
        try:
            list(_texts(spec.form))
        except NotImplementedError as error:
            return str(error)
        return None

    def compile(self, spec: GrammarSpec) -> bytes:
        texts = list(_texts(spec.form))
        if not texts:
            raise ValueError("no text satisfies it")
        return json.dumps(texts).encode()

    def load(self, data: bytes) -> Grammar:
        return self.grammar(self.vocabulary, [text.encode() for text in json.loads(data)])

    @property
    def grammar(self) -> type[ListedGrammar]:
        return ListedGrammar


class ListedGrammar(Grammar):
    def __init__(self, vocabulary: Vocabulary, texts: list[bytes]) -> None:
        self.vocabulary = vocabulary
        self.texts = texts
        self.accepted: list[int] = []

    @property
    def text(self) -> bytes:
        return b"".join(self.vocabulary.tokens[id] for id in self.accepted)

    @property
    def ended(self) -> bool:
        return bool(self.accepted) and self.accepted[-1] in self.vocabulary.stop_ids

    def may_end(self) -> bool:
        return self.text in self.texts

    def ids(self) -> Iterator[int]:
        if self.ended or self.may_end():
            yield from self.vocabulary.stop_ids
        for id, token in enumerate(self.vocabulary.tokens):
            if token and not self.ended and any(text.startswith(self.text + token) for text in self.texts):
                yield id

    def fill(self, mask: np.ndarray) -> None:
        bits = np.zeros(32 * self.vocabulary.words, np.uint8)
        bits[list(self.ids())] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, ids: Sequence[int]) -> bool:
        for id in ids:
            if id not in self.ids():
                return False
            self.accepted.append(id)
        return True

    def rollback(self, count: int) -> None:
        del self.accepted[len(self.accepted) - count :]

    def fork(self) -> Grammar:
        other = type(self)(self.vocabulary, self.texts)
        other.accepted = self.accepted.copy()
        return other


def _texts(form: Form) -> Iterator[str]:
    match form:
        case Fixed(text):
            yield text
        case OneOf(options):
            yield from (text for option in options for text in _texts(option))
        case Series(parts):
            heads = _texts(parts[0]) if parts else iter([""])
            yield from (head + rest for head in heads for rest in (_texts(Series(parts[1:])) if parts else [""]))
        case Repeated(part, separator, least, int(most)):
            for count in range(least, most + 1):
                row = Series(tuple(form for _ in range(count) for form in (Fixed(separator), part)))
                yield from (text.removeprefix(separator) for text in _texts(row))
        case Json({"enum": values, **rest}) if not rest:
            yield from map(json.dumps, values)
        case Json({"const": value, **rest}) if not rest:
            yield json.dumps(value)
        case _:
            raise NotImplementedError(f"form {type(form).__name__}")


class TestListed(GuidedDecodingKit):
    plugin = Listed


def with_grammar(fault: type[ListedGrammar]) -> type[Listed]:
    return type(fault.__name__, (Listed,), {"grammar": fault})


class AllowsSpecialTokens(ListedGrammar):
    def ids(self) -> Iterator[int]:
        yield from super().ids()
        yield 0


class AllowsIdsWithoutAToken(ListedGrammar):
    def fill(self, mask: np.ndarray) -> None:
        super().fill(mask)
        mask[-1] |= np.int32(-(2**31))


class AddsToTheMask(ListedGrammar):
    def fill(self, mask: np.ndarray) -> None:
        before = mask.copy()
        super().fill(mask)
        mask |= before


class AllowsStopTooEarly(ListedGrammar):
    def may_end(self) -> bool:
        return any(text.startswith(self.text) and len(self.text) > 1 for text in self.texts)


class NeverEnds(ListedGrammar):
    def may_end(self) -> bool:
        return False


class KnowsOneStopToken(ListedGrammar):
    def ids(self) -> Iterator[int]:
        yield from (id for id in super().ids() if id != self.vocabulary.stop_ids[1])


class GoesOnAfterTheEnd(ListedGrammar):
    @property
    def ended(self) -> bool:
        return False


class KnowsBytesOnly(ListedGrammar):
    def ids(self) -> Iterator[int]:
        yield from (id for id in super().ids() if len(self.vocabulary.tokens[id]) < 2)


class ForgetsRollback(ListedGrammar):
    def rollback(self, count: int) -> None:
        if count < 3:
            super().rollback(count)


class ForksTheSameState(ListedGrammar):
    def fork(self) -> Grammar:
        other = type(self)(self.vocabulary, self.texts)
        other.accepted = self.accepted
        return other


class AcceptsAnything(ListedGrammar):
    def accept(self, ids: Sequence[int]) -> bool:
        self.accepted += ids
        return True


class OnlyTheFirstCharacterCounts(ListedGrammar):
    def may_end(self) -> bool:
        return any(len(text) == len(self.text) for text in self.texts)

    def ids(self) -> Iterator[int]:
        if self.accepted and not self.may_end():
            yield from range(98, 110)
        else:
            yield from super().ids()


class FillsInTheWrongOrder(Listed):
    def fill(self, grammars: Sequence[Grammar], masks: np.ndarray) -> None:
        super().fill(grammars[::-1], masks)


class SharesStateBetweenGrammars(Listed):
    def load(self, data: bytes) -> Grammar:
        self.loaded: dict[bytes, Grammar] = getattr(self, "loaded", {})
        return self.loaded.setdefault(data, super().load(data))


class LoadsItsOwnOnly(Listed):
    def compile(self, spec: GrammarSpec) -> bytes:
        self.last = super().compile(spec)
        return b"last"

    def load(self, data: bytes) -> Grammar:
        return super().load(self.last)


class IgnoresKeywords(Listed):
    def refuses(self, spec: GrammarSpec) -> str | None:
        return None if isinstance(spec.form, Json) else super().refuses(spec)

    def compile(self, spec: GrammarSpec) -> bytes:
        if isinstance(spec.form, Json) and isinstance(spec.form.schema, dict):
            return super().compile(GrammarSpec(form=OneOf(tuple(map(Fixed, ("1", "[1]", '"a"', "{}"))))))
        return super().compile(spec)


class TakesWhatIsWrong(Listed):
    def compile(self, spec: GrammarSpec) -> bytes:
        return json.dumps(list(_texts(spec.form))).encode()


class ShowsItsInternals(Listed):
    def compile(self, spec: GrammarSpec) -> bytes:
        try:
            return super().compile(spec)
        except ValueError as error:
            raise ValueError(f"{error}\n  at listed/compile.py:10") from None


class RefusesEverything(Listed):
    def refuses(self, spec: GrammarSpec) -> str | None:
        return "form"


FAULTS: dict[type[Any], str] = {
    AllowsSpecialTokens: "test_masks_have_only_tokens_with_a_text_and_stop_tokens",
    AllowsIdsWithoutAToken: "test_masks_have_only_tokens_with_a_text_and_stop_tokens",
    AddsToTheMask: "test_filling_at_once_is_filling_one_by_one",
    AllowsStopTooEarly: "test_a_text_may_end_where_it_is_complete",
    NeverEnds: "test_right_texts_are_allowed",
    KnowsOneStopToken: "test_masks_have_only_tokens_with_a_text_and_stop_tokens",
    GoesOnAfterTheEnd: "test_after_the_end_only_stop_tokens_come",
    KnowsBytesOnly: "test_right_texts_are_allowed",
    ForgetsRollback: "test_rollback_restores",
    ForksTheSameState: "test_a_fork_is_independent",
    AcceptsAnything: "test_masks_and_accept_agree",
    OnlyTheFirstCharacterCounts: "test_random_texts_are_right",
    FillsInTheWrongOrder: "test_filling_at_once_is_filling_one_by_one",
    SharesStateBetweenGrammars: "test_another_object_loads_what_was_compiled",
    LoadsItsOwnOnly: "test_another_object_loads_what_was_compiled",
    IgnoresKeywords: "test_no_keyword_is_ignored",
    TakesWhatIsWrong: "test_wrong_constraints_are_refused",
    ShowsItsInternals: "test_wrong_constraints_are_refused",
    RefusesEverything: "test_some_form_is_enforced",
}


@pytest.mark.parametrize(("fault", "broken"), FAULTS.items())
def test_a_planted_fault_is_caught(fault: type[Any], broken: str) -> None:
    plugin = with_grammar(fault) if issubclass(fault, ListedGrammar) else fault
    failed = {outcome.name: outcome.reason for outcome in run_kit(GuidedDecodingKit, plugin, only=broken)}
    assert failed[broken]
