"""Tools for tests of guided decoding: a vocabulary, the acceptance of a text token by token, and random texts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from ferrule.interfaces.guided_decoding import Grammar, Vocabulary
from ferrule_testkit.kits.base import Broken, promise, shown

# Tokens that cross the borders of JSON's syntax, of words and of characters (é without its second byte).
MERGED = (
    *('{"', '"}', '":', '": ', '", "', '","', '"]', "],", '["', "[[", "]]", "{}", "[]", "},", ' "', ", ", ": ", '""'),
    *("true", "false", "null", "alse", "rue}", "ull]", "12", "00", "0.", "1e", "-1", "10", "1, 2", "1,", "5]", "7}"),
    *(
        "the",
        " the",
        "name",
        '"name',
        'name"',
        '"a"',
        '{"a',
        '"a":',
        "ab",
        "abc",
        "aa",
        "bb",
        "  ",
        "\n",
        "\n  ",
        "yes",
    ),
    *(
        "é",
        "日",
        "本",
        "日本",
        "名",
        "前",
        "🙂",
        "\\n",
        "\\u",
        "\\u00",
        '\\"',
        "<tool",
        "<t",
        "tool>",
        "</",
        "_call>",
        "}<",
        ">{",
        "x<",
        "></",
    ),
)
_ENDINGS = b'"}]'


def vocabulary(merged: Iterable[str] = MERGED) -> Vocabulary:
    """Return a vocabulary of every byte, `merged`, half a character, and special tokens at both ends, two of which
    stop. Its logits are wider than its tokens.
    """
    tokens = [b"", *(bytes([byte]) for byte in range(256)), *(text.encode() for text in merged), b"\xc3", b"\x97\xa5"]
    tokens += [b"", b"", b""]
    return Vocabulary(tokens=tuple(tokens), size=len(tokens) + 21, stop_ids=(len(tokens) - 1, len(tokens) - 3))


def allowed(grammar: Grammar, vocabulary: Vocabulary) -> np.ndarray:
    """Return which tokens may come next, as bits [words * 32] in the order of their ids."""
    mask = np.full(vocabulary.words, 0x5A5A5A5A, np.int32)  # a mask is written and not added to
    grammar.fill(mask)
    return np.unpackbits(mask.view(np.uint8), bitorder="little")


def tokens_of(text: bytes, vocabulary: Vocabulary, rng: random.Random | None = None) -> list[int]:
    """Split a text into tokens: single bytes without `rng`, else any tokens that fit."""
    ids = {token: id for id, token in enumerate(vocabulary.tokens) if token}
    longest = max(map(len, ids))
    found, at = [], 0
    while at < len(text):
        sizes = [size for size in range(1, longest + 1) if text[at : at + size] in ids and at + size <= len(text)]
        size = rng.choice(sizes) if rng else 1
        found.append(ids[text[at : at + size]])
        at += size
    return found


def whole_tokens_of(text: str, vocabulary: Vocabulary, rng: random.Random | None = None) -> list[int]:
    """Split a text into tokens of whole characters. Raises KeyError for a character without a token."""
    ids = {token.decode(errors="ignore"): id for id, token in enumerate(vocabulary.tokens)}
    found, at = [], 0
    while at < len(text):
        sizes = [size for size in range(1, 8) if text[at : at + size] in ids and at + size <= len(text)]
        size = rng.choice(sizes) if rng and sizes else min(sizes, default=1)
        found.append(ids[text[at : at + size]])
        at += size
    return found


def first_refused(grammar: Grammar, vocabulary: Vocabulary, ids: Sequence[int]) -> int | None:
    """Return the index of the first token that the masks or the grammar do not allow, len(ids) if only the end is not
    allowed there, and None if all is.
    """
    for place, token in enumerate(ids):
        if not allowed(grammar, vocabulary)[token] or not grammar.accept([token]):
            return place
    return None if allowed(grammar, vocabulary)[list(vocabulary.stop_ids)].all() else len(ids)


def accepts(grammar: Grammar, vocabulary: Vocabulary, text: str) -> bool:
    """Return whether a grammar in its first state follows a whole text, byte by byte, and may end after it."""
    return first_refused(grammar, vocabulary, tokens_of(text.encode(), vocabulary)) is None


def sample(grammar: Grammar, vocabulary: Vocabulary, rng: random.Random, length: int = 60) -> bytes | None:
    """Return a random text that the masks allow. Tries to end it after `length` tokens; None if it has no end after ten
    times as many.
    """
    text = b""
    for place in range(10 * length):
        bits = allowed(grammar, vocabulary)
        token = _choose(np.flatnonzero(bits), vocabulary, rng, place > length)
        if bits[list(vocabulary.stop_ids)].any() and (token is None or rng.random() < 0.3 or place > length):
            return text
        if token is None:
            raise Broken(f"after {shown(text)} nothing is allowed")
        promise(grammar.accept([token]), f"after {shown(text)} token {token} is allowed and not accepted")
        text += vocabulary.tokens[token]
    return None


def _choose(ids: np.ndarray, vocabulary: Vocabulary, rng: random.Random, hurry: bool) -> int | None:
    """Choose a token, each kind of character as often as another, so that letters do not crowd out the character that
    ends a string.
    """
    kinds = _kinds(vocabulary.tokens)
    ids = ids[ids < len(kinds)]
    found = kinds[ids]
    there = np.flatnonzero(np.bincount(found[found >= 0], minlength=len(_KINDS))).tolist()
    if not there:
        return None
    if hurry and _KINDS.index("end") in there and rng.random() < 0.9:
        ends: list[int] = ids[found == _KINDS.index("end")].tolist()
        return min(ends, key=lambda id: (len(vocabulary.tokens[id]), rng.random()))
    of_one: list[int] = ids[found == rng.choice(there)].tolist()
    return rng.choice(of_one)


_KINDS = ("control", "digit", "end", "letter", "other", "space", "wide")


@lru_cache(maxsize=2)
def _kinds(tokens: tuple[bytes, ...]) -> np.ndarray:
    """Return the index of each token's kind; -1 for one without a text."""
    return np.array([_KINDS.index(_kind(token)) if token else -1 for token in tokens])


def _kind(token: bytes) -> str:
    first = token[:1]
    if first in (b'"', b"}", b"]"):
        return "end"
    if first.isspace():
        return "space"
    if first.isdigit():
        return "digit"
    if first.isalpha():
        return "letter"
    return "control" if first < b" " else "other" if first < b"\x80" else "wide"
