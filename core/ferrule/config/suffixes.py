"""Words behind a colon of a value, as in ``xgrammar:no-fallback,disable-any-whitespace``."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

# Behind the name of a guided-decoding backend: word → what it switches off, as options and parameters call it.
BACKEND_SUFFIXES = MappingProxyType(
    {
        "no-fallback": "disable_fallback",
        "disable-any-whitespace": "disable_any_whitespace",
        "unbounded-whitespace": "unbounded_whitespace",
        "disable-additional-properties": "disable_additional_properties",
    }
)


def split_suffixes(text: str, known: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Split a value from the words behind its colon. Raises ValueError for a word that is not known."""
    value, _, listed = text.partition(":")
    words = tuple(filter(None, listed.split(",")))
    names = tuple(known)
    for word in words:
        if word not in names:
            raise ValueError(f"{word[:64]!r} behind the colon is none of {', '.join(names)}")
    return value, words


def split_backend(text: str) -> tuple[str, frozenset[str]]:
    """Return the name of a guided-decoding backend, and which of `BACKEND_SUFFIXES` it switches off. Raises
    ValueError.
    """
    name, words = split_suffixes(text, BACKEND_SUFFIXES)
    if not name:
        raise ValueError("it must begin with the name of a backend")
    return name, frozenset(BACKEND_SUFFIXES[word] for word in words)
