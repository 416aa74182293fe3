"""What grammars share that do not leave stop tokens to their library."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ferrule.interfaces.guided_decoding import Grammar, Vocabulary

Mask = np.ndarray[Any, Any]  # [words] int32


class Masks:
    """The masks of a vocabulary. `text`: tokens that add something to a text. `stop`: tokens that end it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        stops = set(vocabulary.stop_ids)
        tokens = vocabulary.tokens[: vocabulary.size]
        self.text = mask_of((id for id, token in enumerate(tokens) if token and id not in stops), vocabulary.words)
        self.stop = mask_of(stops, vocabulary.words)
        self.stop_ids = frozenset(stops)


def mask_of(ids: Iterable[int], words: int) -> Mask:
    bits = np.zeros(32 * words, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class TextGrammar(Grammar):
    """A grammar of texts: tokens after the end are counted here, and the library is only asked about the text."""

    def __init__(self, masks: Masks, stopped: int = 0) -> None:
        self.masks = masks
        self.stopped = stopped  # stop tokens that were accepted

    @abstractmethod
    def may_end(self) -> bool:
        """Return whether the text so far is complete."""

    @abstractmethod
    def fill_text(self, mask: Mask) -> None:
        """Write the tokens that may follow; bits of stop tokens and of what is not a token are ignored."""

    @abstractmethod
    def follow(self, id: int) -> bool:
        """Go on by a token that has a text; False when it is not allowed."""

    @abstractmethod
    def take_back(self, count: int) -> None:
        """Go back by `count` tokens of the text."""

    def fill(self, mask: Mask) -> None:
        if self.stopped:
            mask[:] = self.masks.stop
            return
        self.fill_text(mask)
        self.finish(mask)

    def finish(self, mask: Mask) -> None:
        """Correct what `fill_text` wrote."""
        mask &= self.masks.text
        if self.may_end():
            mask |= self.masks.stop

    def accept(self, ids: Sequence[int]) -> bool:
        return all(map(self._accept, ids))

    def _accept(self, id: int) -> bool:
        if id in self.masks.stop_ids:
            self.stopped += bool(allowed := self.stopped > 0 or self.may_end())
            return allowed
        word, bit = divmod(id, 32)
        known = 0 <= word < len(self.masks.text) and bool(self.masks.text[word] >> bit & 1)
        return not self.stopped and known and self.follow(id)

    def rollback(self, count: int) -> None:
        ends = min(count, self.stopped)
        self.stopped -= ends
        if count > ends:
            self.take_back(count - ends)
