"""The output is one of several texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ferrule.forms import Fixed, GrammarSpec, OneOf
from ferrule.interfaces.guided_decoding import Grammar, GrammarBackend, Vocabulary


class ExampleBackend(GrammarBackend):
    """A backend for a choice of fixed texts. It compiles a choice to the list of its texts."""

    def refuses(self, spec: GrammarSpec) -> str | None:
        form = spec.form
        fixed = isinstance(form, OneOf) and all(isinstance(option, Fixed) for option in form.options)
        return None if fixed else f"form {type(form).__name__}"

    def compile(self, spec: GrammarSpec) -> bytes:
        options = spec.form.options if isinstance(spec.form, OneOf) else ()
        if not options:
            raise ValueError("a choice needs an option")
        return json.dumps([option.text for option in options if isinstance(option, Fixed)]).encode()

    def load(self, data: bytes) -> Grammar:
        return Choice(self.vocabulary, [text.encode() for text in json.loads(data)], [])


class Choice(Grammar):
    """A grammar of fixed texts. `accepted` are the tokens so far, those that stop included."""

    def __init__(self, vocabulary: Vocabulary, texts: list[bytes], accepted: list[int]) -> None:
        self._vocabulary, self._texts, self._accepted = vocabulary, texts, accepted

    def _allowed(self) -> Iterator[int]:
        ended = bool(self._accepted) and self._accepted[-1] in self._vocabulary.stop_ids
        text = b"".join(self._vocabulary.tokens[token] for token in self._accepted)
        if ended or text in self._texts:
            yield from self._vocabulary.stop_ids
        for token, added in enumerate(self._vocabulary.tokens):
            if added and not ended and any(wanted.startswith(text + added) for wanted in self._texts):
                yield token

    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        bits = np.zeros(32 * self._vocabulary.words, np.uint8)
        bits[list(self._allowed())] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, ids: Sequence[int]) -> bool:
        for token in ids:
            if token not in self._allowed():
                return False
            self._accepted.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self._accepted[len(self._accepted) - count :]

    def fork(self) -> Grammar:
        return Choice(self._vocabulary, self._texts, self._accepted.copy())
