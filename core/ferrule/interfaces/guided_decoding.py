"""`guided_decoding`: output of a given form. Entry point name = what `--guided-decoding-backend` takes.

A constraint is compiled in a child process that has a deadline and a memory limit, because it comes from a client.
What the child returns is loaded by the engine, which then masks the logits of every token of the request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct

from ferrule.forms import GrammarSpec

if TYPE_CHECKING:
    import numpy as np


class Vocabulary(Struct, frozen=True):
    """Facts about a tokenizer and its model, for backends.

    `tokens[id]` are the bytes that a token adds to a text; b"" for ids without a text and for special tokens, which are
    never part of constrained output. Special tokens that the formats of the server's parsers are written with count as
    their text. `size` is the width of the logits. `stop_ids` end a text.
    """

    tokens: tuple[bytes, ...]
    size: int
    stop_ids: tuple[int, ...]

    @property
    def words(self) -> int:
        """Width of a mask, in words of 32 tokens."""
        return -(-self.size // 32)


class Grammar(ABC):
    """The state of one constrained output. Used by one thread at a time.

    `fill` and `accept` may raise ValueError, fit for the client, when the constraint turns out to be too complex: that
    ends its request.
    """

    @abstractmethod
    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        """Write which tokens may come next to `mask` [words] int32: bit id % 32 of word id // 32 is 1 for those.

        When the text can end, the stop tokens are among them; when it must end, or has ended, they are all.
        """

    @abstractmethod
    def accept(self, ids: Sequence[int]) -> bool:
        """Follow the output by these tokens. False, and an undefined state, when one of them is not allowed.

        A stop token ends the text where it can end. After that only stop tokens are allowed, without effect.
        """

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""

    @abstractmethod
    def fork(self) -> Grammar:
        """Return an independent grammar in the same state."""


class GrammarBackend(ABC):
    """A library that constrains output. One object per process and vocabulary; thread-safe.

    `refuses` and `compile` run in the child, `load` and grammars in the engine's process. `auto` asks backends by their
    `auto_order`, the lowest first; it is a literal of the class itself, because it is read without an import.
    """

    auto_order: ClassVar[int] = 0

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def refuses(self, spec: GrammarSpec) -> str | None:
        """Name the part of the constraint that this backend cannot enforce ("keyword uniqueItems"), or return None.

        A constraint that is not refused is enforced completely: no keyword is ignored. Raises ValueError as `compile`
        does, or leaves that to it.
        """

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> bytes:
        """Compile the constraint into the bytes that `load` needs.

        Raises ValueError, fit for the client, for a constraint that is wrong or impossible.
        """

    @abstractmethod
    def load(self, data: bytes) -> Grammar:
        """Return the grammar in its first state. `data` was returned by `compile`, in another process."""

    def fill(self, grammars: Sequence[Grammar], masks: np.ndarray[Any, Any]) -> None:
        """Fill row r of `masks` [rows, words] int32 by `grammars[r]`; at once where the library can."""
        for grammar, mask in zip(grammars, masks, strict=True):
            grammar.fill(mask)
