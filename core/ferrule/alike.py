"""Which of the known names a written one was meant to be: typing errors, not words that merely share letters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from itertools import takewhile

_ALIKE = 0.75  # of two words' letters, in order: one slip in four letters, two in eight
_SHORT = 2  # letters of a word, where the share says little
_ABBREVIATED = 4  # letters that may stand for a word which begins with them
_SHARED = 2  # words that names have in common where one only has words more
_LONGEST = 64  # characters of a name that is compared
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W_A-Z]+")


def alike(name: str, choices: Iterable[str], most: int = 3) -> list[str]:
    """Return the choices that `name` may be a misspelling of, the closest first, and equally close ones by name.

    Names are compared word by word, from both ends: what they share does not make up for words that differ, as those of
    "enable-foo" and "enable-lora" do. One name may have words more, if both share two.
    """
    written = _words(name)
    scored = ((_likeness(written, _words(choice)), choice) for choice in choices)
    found = sorted((pair for pair in scored if pair[0]), key=lambda pair: (-pair[0], pair[1]))
    return [choice for _, choice in found[:most]]


def _words(name: str) -> list[str]:
    """Split a name of any spelling into words: max_tokens, --max-tokens, MAX_TOKENS, maxTokens."""
    return [word.lower() for word in _WORD.findall(name[:_LONGEST])]


def _likeness(one: list[str], other: list[str]) -> float:
    """Return how alike two names are, from 0 for different ones to 1 for the same words."""
    if not one or not other:
        return 0.0
    head = _in_common(one, other)
    tail = _in_common(one[head:][::-1], other[head:][::-1])
    left, right = ("".join(words[head : len(words) - tail]) for words in (one, other))
    if (left and right and not _same_word(left, right)) or (left == "") != (right == "") and head + tail < _SHARED:
        return 0.0
    return SequenceMatcher(None, "_".join(one), "_".join(other), autojunk=False).ratio()


def _in_common(one: list[str], other: list[str]) -> int:
    """Count the words that both names begin with."""
    return sum(1 for _ in takewhile(lambda pair: _same_word(*pair), zip(one, other, strict=False)))


def _same_word(one: str, other: str) -> bool:
    """Return whether one word may be the other, or its beginning, with a slip: other letters, two that are swapped, one
    more.
    """
    short, long = sorted((len(one), len(other)))
    if sorted(one) == sorted(other) or (short >= _ABBREVIATED and other.startswith(one)):
        return True
    if short <= _SHORT:
        return long == short + 1 and _matched(one, other) == short
    return 2 * short >= _ALIKE * (short + long) and 2 * _matched(one, other) >= _ALIKE * (short + long)


def _matched(one: str, other: str) -> int:
    """Count the letters that both words have in the same order."""
    return sum(block.size for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks())
