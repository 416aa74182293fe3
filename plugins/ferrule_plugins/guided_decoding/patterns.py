"""Regular expressions as libraries with finite automata take them: no anchors, no assertions, no references."""

from __future__ import annotations

from collections.abc import Iterator

_ANY = r"[\s\S]*"
_ANYWHERE = "dDwWsStnrfv0xu\\/.-^$*+?()[]{}|\"'!#%&,:;<=>@_`~ "  # what may follow a backslash


class UnsupportedPattern(ValueError):
    """A pattern that is not a regular expression in the narrow sense."""


def whole(pattern: str) -> str:
    """The pattern for a text that it matches as a whole. Raises UnsupportedPattern."""
    return "|".join(body for body, _, _ in _branches(pattern))


def anywhere(pattern: str) -> str:
    """The pattern for a text in which it is found (JSON Schema's `pattern`). Raises UnsupportedPattern."""
    found = []
    for body, starts, ends in _branches(pattern):
        found.append(f"{'' if starts else _ANY}{body}{'' if ends else _ANY}")
    return "|".join(found)


def _branches(pattern: str) -> Iterator[tuple[str, bool, bool]]:
    """(pattern without anchors, begins with ^, ends with $) of each alternative of the whole pattern."""
    start, depth = 0, 0
    marks = list(_marks(pattern))
    cuts = []
    for at, mark in marks:
        depth += (mark == "(") - (mark == ")")
        if depth < 0:
            raise UnsupportedPattern("a parenthesis that was not opened")
        if mark == "|" and depth == 0:
            cuts.append(at)
    anchors = {at for at, mark in marks if mark in "^$"}
    for end in (*cuts, len(pattern)):
        starts, ends = start in anchors, end - 1 in anchors and end - 1 >= start
        anchors -= {start, end - 1}
        yield pattern[start + starts : max(start + starts, end - ends)], starts, ends
        start = end + 1
    if anchors:
        raise UnsupportedPattern("an anchor inside a pattern")


def _marks(pattern: str) -> Iterator[tuple[int, str]]:
    """(place, character) of what has a meaning for the structure, outside escapes and character classes."""
    at, inside = 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            _check_escape(pattern[at + 1 : at + 2])
            at += 1
        elif inside:
            inside = char != "]"
        elif char == "[":
            inside = True
        elif char == "(" and pattern.startswith("?", at + 1) and not pattern.startswith("?:", at + 1):
            raise UnsupportedPattern(f"{pattern[at : at + 4]!r} in a pattern")
        elif char in "()|^$":
            yield at, char
        at += 1


def _check_escape(char: str) -> None:
    if not char:
        raise UnsupportedPattern("a backslash at the end of a pattern")
    if char not in _ANYWHERE:
        raise UnsupportedPattern(f"'\\{char}' in a pattern")
