"""A few texts of a constraint, followed token by token before it is served: some faults of libraries only show then."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

import numpy as np

from ferrule.interfaces.guided_decoding import Grammar, Vocabulary

_TEXTS = 6
_TOKENS = 40  # of one text
_SECONDS = 0.05  # for all of them
_STRING = 64  # bytes that may come in the midst of a string, at least
_LONG, _SHORT = b',{[":', b'}]"'  # of JSON: what makes a text long, with all its properties, and what ends it soon

_Choice = Callable[[list[int]], int]  # of one of the bytes that may come


class Trial:
    """A trial of grammars on texts that are written in tokens of one byte."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        stops = set(vocabulary.stop_ids)
        tokens = enumerate(vocabulary.tokens[: vocabulary.size])
        self._ids = {token[0]: id for id, token in tokens if len(token) == 1 and id not in stops}
        self._bytes = np.array([*self._ids], np.uint8)
        ids = np.array([*self._ids.values()], np.int32)
        self._places, self._bits = ids // 32, np.left_shift(np.int32(1), ids % 32)
        self._words = vocabulary.words

    def follow(self, first: Grammar) -> None:
        """Follow a long and a short text, if the constraint is JSON, and then random ones.

        Raises ValueError when no text satisfies the constraint, or where a text cannot go on; also what the grammar
        raises.
        """
        deadline, source = time.monotonic() + _SECONDS, random.Random(0)
        choices = [_preferring(_LONG), _preferring(_SHORT)]
        for walk in range(_TEXTS):
            choose = choices[walk] if walk < len(choices) else source.choice
            if not self._follow(first.fork(), choose, deadline):
                return

    def _follow(self, grammar: Grammar, choose: _Choice, deadline: float) -> bool:
        """Write one text that the grammar allows, and return whether there is time for another. Raises ValueError."""
        mask = np.zeros(self._words, np.int32)
        for place in range(_TOKENS):
            grammar.fill(mask)
            if not mask.any():
                raise ValueError("some of its texts cannot be completed" if place else "no text satisfies it")
            texts = self._bytes[mask[self._places] & self._bits != 0].tolist()
            if not texts or time.monotonic() > deadline:
                break
            if not grammar.accept([self._ids[choose(texts)]]):
                raise ValueError("it is too complex")
        return time.monotonic() < deadline


def _preferring(order: Iterable[int]) -> _Choice:
    """Return a choice of the first of these bytes that may come, else of a digit, a letter, or another byte.

    Where most bytes may come, the text is in a string, and the choice ends it.
    """
    ranks = {byte: rank for rank, byte in enumerate(order)}

    def rank(byte: int) -> tuple[int, int]:
        return ranks.get(byte, len(ranks) + (not chr(byte).isalnum())), byte

    return lambda bytes: ord('"') if len(bytes) > _STRING and ord('"') in bytes else min(bytes, key=rank)
