"""From token ids to text, one token at a time, in constant time per token.

The text that comes out, joined, is `decode` of all the ids, whatever the cut into deltas; an incomplete UTF-8 sequence
(at most three bytes) waits for the token that completes it, and becomes U+FFFD at the end of the output. There is one
implementation per kind of tokenizer and no second one for whole texts: `decode` is the fold of the same feed.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import takewhile

from ferrule.interfaces.tokenizer import Tokenizer

__all__ = ["Detokenizer", "decode", "open_detokenizer"]

_WINDOW = 64  # tokens after which a window is closed even where its text does not end in a whole character
_UNSETTLED = 3  # an incomplete character at the end shows as one to three U+FFFD, depending on the tokenizer
_LOST = "\ufffd"


class Detokenizer(ABC):
    """One choice's text. Nothing is fed after `finish`. A shallow copy is a fork: no state is changed in place.

    `begin` is where the token that was fed last begins in the text that came with it: behind what stands for parts of
    characters before it that were never completed. A token within a character begins where the character does.
    """

    begin = 0

    @abstractmethod
    def feed(self, token_id: int) -> str:
        """Return the text that is certain now; often this token's, "" when it ends inside a character."""

    @abstractmethod
    def finish(self) -> str:
        """Return the text that was held back."""


def open_detokenizer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    kept: frozenset[int] = frozenset(),
    spaces_between_special_tokens: bool = True,
) -> Detokenizer:
    """Open a detokenizer for the tokens after `prompt_ids`, whose own text is not returned.

    `kept`: special tokens that are not skipped with the others. The prompt matters for one thing: where it has visible
    tokens, the output's first token is not the first of the text and keeps the space that its tokenizer writes before
    words.
    """
    skipped = tokenizer.all_special_ids - kept if skip_special_tokens else frozenset[int]()
    first = all(token in skipped for token in prompt_ids)
    joined = frozenset[int]() if spaces_between_special_tokens or skip_special_tokens else tokenizer.all_special_ids
    if tokenizer.piece(0, False) is None:
        context = [token for token in prompt_ids[-_WINDOW:] if token not in skipped][-5:]
        return _Windows(tokenizer, context, skipped, joined)
    return _Pieces(tokenizer, first, skipped, joined)


def decode(
    tokenizer: Tokenizer, ids: Iterable[int], *, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
) -> str:
    """Return the text of whole output `ids`. Ids out of range add nothing."""
    detokenizer = open_detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, kept=kept)
    parts = [detokenizer.feed(token) for token in ids]
    parts.append(detokenizer.finish())
    return "".join(parts)


def offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Return where the tokens of `text` begin in it, in characters. Special tokens around the text have no length.

    If the tokenizer changes texts, the places after a change are approximate.
    """
    inside = shown(tokenizer, ids, text)
    detokenizer, found, at = open_detokenizer(tokenizer, skip_special_tokens=False), [0] * inside.start, 0
    for place in inside:
        piece = detokenizer.feed(ids[place])
        found.append(min(at + detokenizer.begin, len(text)))
        at = min(at + len(piece), len(text))
    return found + [len(text)] * (len(ids) - inside.stop)


def shown(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> range:
    """Return the places of the ids that spell `text`, without special tokens that the tokenizer has put around it."""
    special = tokenizer.all_special_ids.__contains__
    begin = [tokenizer.token(token) or "" for token in takewhile(special, ids)]
    end = [tokenizer.token(token) or "" for token in takewhile(special, reversed(ids[len(begin) :]))][::-1]
    first = next(count for count in range(len(begin) + 1) if text.startswith("".join(begin[count:])))
    kept = next(count for count in range(len(end), -1, -1) if text.endswith("".join(end[:count])))
    return range(first, len(ids) - len(end) + kept)


class _Pieces(Detokenizer):
    """A detokenizer for tokenizers whose tokens are bytes, whatever stands beside them."""

    __slots__ = ("_after_special", "_first", "_joined", "_pending", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, first: bool, skipped: frozenset[int], joined: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._first = first
        self._skipped = skipped
        self._joined = joined  # special tokens between which no space is written
        self._after_special = False
        self._pending = b""  # the beginning of a character

    def feed(self, token_id: int) -> str:
        self.begin = 0
        if token_id in self._skipped:
            return ""
        if self._joined:
            special = token_id in self._joined
            bare = special and self._after_special
            self._after_special = special
            if bare:
                return self._decode((self._tokenizer.token(token_id) or "").encode())
        piece = self._tokenizer.piece(token_id, self._first)
        self._first = False
        return self._decode(piece) if piece else ""

    def finish(self) -> str:
        return self._decode(b"", True)

    def _decode(self, piece: bytes, final: bool = False) -> str:
        data = self._pending + piece
        self.begin = int(bool(self._pending and piece) and not _continues(self._pending, piece))
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        return text


def _continues(pending: bytes, piece: bytes) -> bool:
    """Return whether a piece continues the character that has begun."""
    try:
        codecs.utf_8_decode(pending + piece[:1], "strict", False)
    except UnicodeDecodeError:
        return False
    return True


class _Windows(Detokenizer):
    """A detokenizer for any tokenizer: it decodes a short window of tokens, and returns what is new and certain of its
    text.

    The window begins with up to five tokens of context, whose text is dropped: they make the tokenizer write the spaces
    that belong between tokens.
    """

    __slots__ = ("_after_special", "_given", "_ids", "_joined", "_num_context", "_skipped", "_tokenizer", "_unsettled")

    def __init__(
        self, tokenizer: Tokenizer, context: list[int], skipped: frozenset[int], joined: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._joined = joined  # special tokens between which no space is written
        self._after_special = False
        self._ids = context
        self._num_context = len(context)
        self._given = len(self._text(context))  # characters of the window's text that are out
        self._unsettled = ""  # what follows them: the beginning of a character, as it looks

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def feed(self, token_id: int) -> str:
        self.begin = 0
        if token_id in self._skipped:
            return ""
        special = token_id in self._joined
        if special and self._after_special:
            return self._begin_anew(token_id)
        self._after_special = special
        self._ids = [*self._ids, token_id]
        text = self._text(self._ids)
        settled = len(text)
        while settled and len(text) - settled < _UNSETTLED and text[settled - 1] == _LOST:
            settled -= 1
        whole = settled == len(text)
        closes = whole or len(self._ids) - self._num_context >= _WINDOW
        before, self._unsettled = self._unsettled, "" if closes else text[settled:]
        new = self._give(text if closes else text[:settled])
        self.begin = len(before) if new.startswith(before) else 0
        if closes:
            self._close()
        return new

    def _begin_anew(self, token_id: int) -> str:
        """Return the rest of the window and a special token as it is written alone; this token is the context of the
        next ones.
        """
        new = self._give(self._text(self._ids))
        self.begin, self._unsettled = len(new), ""
        new += self._text([token_id])
        self._ids = [token_id]
        self._close()
        return new

    def _close(self) -> None:
        """Make the last tokens, whose text is out, the context of a new window."""
        self._ids = self._ids[-5:]
        self._num_context = len(self._ids)
        self._given = len(self._text(self._ids))

    def finish(self) -> str:
        return self._give(self._text(self._ids))

    def _give(self, text: str) -> str:
        new = text[self._given :]
        self._given = max(self._given, len(text))
        return new
