"""`tokenizer`: text to ids and back. Entry point name = what `--tokenizer-mode` takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any


class Tokenizer(ABC):
    """A thread-safe tokenizer. Ids range over [0, vocab_size); the model's logits may be wider or narrower."""

    vocab_size: int  # added tokens included
    bos_token_id: int | None
    eos_token_id: int | None
    special_tokens: dict[str, str]  # bos_token, eos_token, … as templates use them
    all_special_ids: frozenset[int]
    chat_template: str | dict[str, str] | None  # one, or named ones
    settings: Mapping[str, Any] = MappingProxyType({})  # of ``tokenizer_config.json``, for clients that ask

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Special tokens written in the text are recognised."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD. Ids out of range are ignored."""

    @abstractmethod
    def token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of an id, or None when the id is out of range."""

    def piece(self, token_id: int, first: bool) -> bytes | None:
        """Return the bytes that a token adds to a text, or None when its neighbours decide that.

        `first`: no token stands before it. An id out of range adds nothing. A tokenizer answers None for all ids or for
        none; with None, text is decoded in windows by `decode`, which costs more.
        """
        return None


class ChatTokenizer(Tokenizer):
    """A tokenizer that writes conversations itself, where neither the server nor the request has a chat template."""

    reads: frozenset[str] = frozenset()  # variables that `encode_chat` uses, as tools and reasoning_effort

    @abstractmethod
    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, continued: bool
    ) -> list[int]:
        """Return the ids of a conversation, up to where the model's next message begins, or, if `continued`, goes on.

        `messages` and `variables` are as chat templates get them: content is a text or a list of text parts, arguments
        of calls are objects. Raises RequestError for what the model's format does not have.
        """


class TokenizerSource(ABC):
    @abstractmethod
    def open(self, folder: Path, options: dict[str, Any]) -> Tokenizer:
        """Load the tokenizer of a folder. Raises CheckpointError naming the file."""
