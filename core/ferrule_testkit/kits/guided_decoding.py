"""The kit of guided decoding."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np

from ferrule.forms import Anything, Form, GrammarSpec, Json, OneOf, Series, Triggered, Until
from ferrule.interfaces.guided_decoding import Grammar, GrammarBackend
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown
from ferrule_testkit.kits.forms import FORMS, KEYWORDS, WRONG, FormTexts
from ferrule_testkit.kits.guided_texts import allowed, first_refused, sample, tokens_of, vocabulary, whole_tokens_of

_WALKS = 12  # random texts of each form
_OTHER_TOKENS = 12  # tokens outside the mask that are tried at a place


class _Parts(Kit):
    """The material of the promises: compiled forms, and places in their texts."""

    forms: Sequence[FormTexts] = FORMS
    half_characters: bool = True  # whether tokens that are parts of a character are allowed

    def setup_method(self) -> None:
        super().setup_method()
        self.vocabulary = vocabulary()
        self.compiled = cache(lambda: list(self._compiled()))

    def make(self) -> GrammarBackend:
        backend: GrammarBackend = self.plugin(self.vocabulary)
        return backend

    def _compiled(self) -> Iterator[tuple[FormTexts, bytes]]:
        """Yield each form that is not refused, compiled."""
        backend = self.make()
        for texts in self.forms:
            spec = GrammarSpec(form=texts.form)
            if backend.refuses(spec) is None:
                yield texts, backend.compile(spec)

    def _grammars(self) -> Iterator[tuple[FormTexts, Callable[[], Grammar]]]:
        """Yield each form that is not refused, and a function that makes its grammar in its first state."""
        backend = self.make()
        for texts, data in self.compiled():
            yield texts, lambda data=data: backend.load(data)  # type: ignore[misc]

    def _steps(self) -> Iterator[tuple[FormTexts, Grammar, np.ndarray]]:
        """Yield (form, grammar, its mask as bits) at each place of a text of each form."""
        for texts, grammar in self._grammars():
            current = grammar()
            for token in [*self._tokens(texts.good[-1], random.Random(4)), None]:
                yield texts, current, allowed(current, self.vocabulary)
                if token is not None:
                    current.accept([token])

    def _beside(self) -> tuple[GrammarBackend, list[Grammar]]:
        """Return grammars of all forms at different places, some of them finished, and the backend that made them."""
        backend, found = self.make(), []
        for texts, data in self.compiled():
            ids = [*self._tokens(texts.good[-1]), self.vocabulary.stop_ids[0]]
            for end in (0, len(ids), len(ids) // 2, len(ids) - 1):
                grammar = backend.load(data)
                grammar.accept(ids[:end])
                found.append(grammar)
        return backend, found

    def _tokens(self, text: str, rng: random.Random | None = None) -> list[int]:
        """Split a text into tokens: the shortest ones without `rng`."""
        if self.half_characters:
            return tokens_of(text.encode(), self.vocabulary, rng)
        return whole_tokens_of(text, self.vocabulary, rng)

    def _text(self, ids: Sequence[int]) -> str:
        return shown([self.vocabulary.tokens[id] for id in ids])


class _Constraints(_Parts):
    """Promises about constraints that are wrong, or of which a backend may support less."""

    def test_wrong_constraints_are_refused(self) -> None:
        """Refuse a constraint that is wrong or that nothing satisfies, or raise ValueError with one line."""
        backend = self.make()
        for form in WRONG:
            spec = GrammarSpec(form=form)
            try:
                refused = backend.refuses(spec)
                if refused is None:
                    backend.compile(spec)
            except ValueError as error:
                text = str(error)
                promise(0 < len(text) <= 1000 and "\n" not in text, f"the error of {shown(form)} is {shown(text)}")
                promise(
                    re.search(r"0x[0-9a-f]{6}|\w/\w+\.\w", text) is None, f"an error shows internals: {shown(text)}"
                )
                continue
            promise(refused is not None, f"{shown(form)} is compiled")

    def test_options_about_json_are_followed(self) -> None:
        """Follow the constraint's options about white space, its pattern and further properties, or refuse the
        constraint.
        """
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        for options, bad in (
            ({"any_whitespace": False}, ('{\n"a":1}', '{"a":  1}', '{"a":\t1}')),
            ({}, ('{"a"  :1}', '{"a":\t1}', '{"a":\n\n1}', "{" + "\n" + 40 * " " + '"a":1}')),
            ({"whitespace_pattern": "[ ]?"}, ('{\n"a":1}', '{"a":  1}')),
            ({"additional_properties": False}, ('{"a":1,"b":2}', '{"a": 1, "b": 2}')),
        ):
            spec = GrammarSpec(form=Json(schema), **options)
            backend = self.make()
            if backend.refuses(spec):
                continue
            data = backend.compile(spec)
            for text in bad:
                ids = self._tokens(text)
                promise(
                    first_refused(backend.load(data), self.vocabulary, ids) is not None, f"{options} allows {text!r}"
                )


class GuidedDecodingKit(_Constraints):
    """A backend allows exactly the tokens with which a text of the form can go on, or refuses the form.

    Give `forms` where those of the kit say too little of what the plugin is for, and `half_characters` as False where
    a character is always one token or part of one.
    """

    kind = "guided_decoding"

    def test_some_form_is_enforced(self) -> None:
        """Accept at least one of the forms, and refuse the others with a reason of one line."""
        backend = self.make()
        refused = [backend.refuses(GrammarSpec(form=texts.form)) for texts in self.forms]
        promise(None in refused, f"all forms are refused: {shown(refused)}")
        for reason in filter(None, refused):
            promise(isinstance(reason, str) and "\n" not in reason, f"a reason is {shown(reason)}")

    def test_right_texts_are_allowed(self) -> None:
        """Allow a text of the form however it is split into tokens, and allow its end."""
        for texts, grammar in self._grammars():
            for text in texts.good:
                for seed in (None, 1, 2, 3):
                    ids = self._tokens(text, None if seed is None else random.Random(seed))
                    place = first_refused(grammar(), self.vocabulary, ids)
                    promise(place is None, f"{shown(texts.form)} does not allow token {place} of {self._text(ids)}")

    def test_wrong_texts_are_not_allowed(self) -> None:
        """Do not allow a text that is not of the form, or its end."""
        for texts, grammar in self._grammars():
            for text in texts.bad:
                for seed in (None, 1, 2):
                    ids = self._tokens(text, None if seed is None else random.Random(seed))
                    wrong = first_refused(grammar(), self.vocabulary, ids) is None
                    promise(not wrong, f"{shown(texts.form)} allows {self._text(ids)}")

    def test_random_texts_are_right(self) -> None:
        """Allow a next token whatever was chosen among the allowed ones, and end only texts of the form."""
        for texts, grammar in self._grammars():
            ended = 0
            for seed in range(_WALKS):
                text = sample(grammar(), self.vocabulary, random.Random(seed), 4 + 2 * seed)
                ended += text is not None
                right = text is None or _decoded_right(texts, text)
                promise(right, f"{shown(texts.form)} allows the text {shown(text)}")
            if not _waits(texts.form):  # what ends it does not come by chance
                promise(ended > 0, f"no random text of {shown(texts.form)} comes to an end")

    def test_no_keyword_is_ignored(self) -> None:
        """Enforce or refuse each keyword of JSON Schema."""
        backend, known = self.make(), 0
        for schema, valid, invalid in KEYWORDS:
            spec = GrammarSpec(form=Json(schema))
            if backend.refuses(spec):
                continue
            data, known = backend.compile(spec), known + 1
            for value, wanted in ((valid, True), (invalid, False)):
                ids = self._tokens(json.dumps(value))
                found = first_refused(backend.load(data), self.vocabulary, ids) is None
                promise(found == wanted, f"{json.dumps(schema)} {'allows' if found else 'does not allow'} {value!r}")
        if not known:
            does_not_apply("all schemas are refused")

    def test_masks_have_only_tokens_with_a_text_and_stop_tokens(self) -> None:
        """Never allow special tokens, ids without a token and bits beyond the logits; allow stop tokens all or none."""
        stops = list(self.vocabulary.stop_ids)
        known = {id for id, token in enumerate(self.vocabulary.tokens) if token} | set(stops)
        for texts, _, bits in self._steps():
            unknown = [id for id in np.flatnonzero(bits).tolist() if id not in known]
            promise(not unknown, f"{shown(texts.form)} allows {unknown[:5]}, which are not tokens of a text")
            promise(len(set(bits[stops].tolist())) == 1, f"{shown(texts.form)} allows some of the stop tokens only")

    def test_a_text_may_end_where_it_is_complete(self) -> None:
        """Allow and accept stop tokens exactly where the text so far is of the form."""
        stop = self.vocabulary.stop_ids[0]
        for texts, grammar in self._grammars():
            for text in texts.good:
                current, so_far = grammar(), b""
                for token in [*self._tokens(text), None]:
                    ends = bool(allowed(current, self.vocabulary)[stop])
                    accepted = current.fork().accept([stop])
                    promise(ends == accepted, f"a stop token is {accepted} for accept and {ends} in the mask")
                    right = _decoded_right(texts, so_far) and (_whole(so_far) or ends)
                    promise(ends == right, f"{shown(texts.form)}: {shown(so_far)} {'may' if ends else 'may not'} end")
                    if token is not None and current.accept([token]):
                        so_far += self.vocabulary.tokens[token]

    def test_after_the_end_only_stop_tokens_come(self) -> None:
        """Finish a grammar with a stop token: allow any number of stop tokens after it, and nothing else."""
        first, second = self.vocabulary.stop_ids
        for texts, grammar in self._grammars():
            current = grammar()
            current.accept([*self._tokens(texts.good[0])])
            promise(current.accept([second]), "the second of the stop tokens is not accepted")
            for _ in range(3):
                found = set(np.flatnonzero(allowed(current, self.vocabulary)).tolist())
                promise(found == {first, second}, f"after the end {sorted(found)[:9]} are allowed")
                promise(not current.fork().accept([98]), "after the end a token is accepted")
                promise(current.accept([first]), "after the end a stop token is not accepted")

    def test_masks_and_accept_agree(self) -> None:
        """Accept a token that the mask allows, and no other."""
        rng = random.Random(0)
        for texts, grammar, bits in self._steps():
            for wanted in (1, 0):
                ids = np.flatnonzero(bits[: self.vocabulary.size] == wanted).tolist()
                for id in rng.sample(ids, min(len(ids), _OTHER_TOKENS)):
                    found = grammar.fork().accept([id])
                    promise(found == bool(wanted), f"{shown(texts.form)}: token {id} is {wanted} in the mask")

    def test_rollback_restores(self) -> None:
        """Restore the former masks and state by a rollback, over stop tokens too."""
        rng = random.Random(1)
        for texts, grammar in self._grammars():
            for text in texts.good:
                current, before = grammar(), [allowed(grammar(), self.vocabulary)]
                ids = [*self._tokens(text, rng), *self.vocabulary.stop_ids]
                for token in ids:
                    current.accept([token])
                    before.append(allowed(current, self.vocabulary))
                for _ in range(6):
                    count = rng.randint(0, len(ids))
                    current.rollback(count)
                    same = np.array_equal(before[len(ids) - count], allowed(current, self.vocabulary))
                    promise(same, f"{shown(texts.form)}: a rollback by {count} of {len(ids)} gives another mask")
                    promise(current.accept(ids[len(ids) - count :]), "a rollback does not allow the same tokens")

    def test_a_fork_is_independent(self) -> None:
        """Fork a grammar in the same state; a change of either does not change the other."""
        for texts, grammar in self._grammars():
            ids = self._tokens(texts.good[-1])
            half = len(ids) // 2
            current = grammar()
            current.accept(ids[:half])
            mask = allowed(current, self.vocabulary)
            fork = current.fork()
            promise(np.array_equal(mask, allowed(fork, self.vocabulary)), "a fork has another mask")
            promise(fork.accept(ids[half:]), f"{shown(texts.form)}: a fork does not go on")
            promise(np.array_equal(mask, allowed(current, self.vocabulary)), "a fork changes what it was forked from")
            fork.rollback(len(ids) - half)
            promise(np.array_equal(mask, allowed(fork, self.vocabulary)), "a fork cannot go back to where it began")

    def test_filling_at_once_is_filling_one_by_one(self) -> None:
        """Write to each row, when `fill` gets many grammars, the mask that the row's grammar writes alone."""
        backend, grammars = self._beside()
        wanted = np.zeros((len(grammars), self.vocabulary.words), np.int32)
        for grammar, row in zip(grammars, wanted, strict=True):
            grammar.fill(row)
        for before in (0, -1):
            masks = np.full_like(wanted, before)
            backend.fill(grammars, masks)
            wrong = [row for row in range(len(grammars)) if not np.array_equal(masks[row], wanted[row])]
            promise(not wrong, f"rows {wrong[:5]} of {len(grammars)} differ when they are filled at once")

    def test_another_object_loads_what_was_compiled(self) -> None:
        """Load a grammar from the bytes and the vocabulary only; grammars that were loaded share no state."""
        other = self.make()
        for texts, data in self.compiled()[1:] + self.compiled()[:1]:
            first, second = other.load(data), other.load(data)
            fresh = allowed(second, self.vocabulary)
            ids = self._tokens(texts.good[0])
            promise(first.accept(ids), f"{shown(texts.form)}: another object's grammar is another")
            same = np.array_equal(fresh, allowed(second, self.vocabulary))
            promise(same, f"{shown(texts.form)}: two grammars of one constraint share their state")


def _waits(form: Form) -> bool:
    """Return whether a text of the form begins with any text up to a stop."""
    match form:
        case OneOf(options):
            return all(map(_waits, options))
        case Series(parts):
            return bool(parts) and _waits(parts[0])
    return isinstance(form, Until)


def _decoded_right(texts: FormTexts, text: bytes) -> bool:
    """Free text may have bytes that are not characters, as all that a model writes."""
    free = isinstance(texts.form, Anything | Triggered) or _waits(texts.form)
    return (free or _whole(text)) and texts.right(text.decode(errors="replace"))


def _whole(text: bytes) -> bool:
    """Return whether `text` consists of whole characters, and not also of the beginning of one."""
    return "\ufffd" not in text.decode(errors="replace")
