"""Regular expressions as libraries with finite automata take them: no anchors, no assertions, no references."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ANY = r"[\s\S]*"
_ANYWHERE = "dDwWsStnrfv0xu\\/.-^$*+?()[]{}|\"'!#%&,:;<=>@_`~ "  # what may follow a backslash

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAYS = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAY = f"(?:{_DAYS}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"

# JSON Schema's formats, exactly: libraries allow the 30th of February, or a second 60 at any time.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
}

# A character of a JSON string, with all escapes; of surrogates, pairs.
_HEX = "[0-9a-fA-F]"
_NUMBER = f"(?:[0-9a-cA-CefEF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}|[dD][89abAB]{_HEX}{{2}}\\\\u[dD][c-fC-F]{_HEX}{{2}})"
CHARACTER = rf'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u{_NUMBER})'


class UnsupportedPattern(ValueError):
    """A pattern that is not a regular expression in the narrow sense."""


def whole(pattern: str) -> str:
    """Return the pattern for a text that it matches as a whole. Raises UnsupportedPattern."""
    return "|".join(body for body, _, _ in _branches(pattern))


def anywhere(pattern: str) -> str:
    """Return the pattern for a text in which it is found (JSON Schema's `pattern`). Raises UnsupportedPattern."""
    found = []
    for body, starts, ends in _branches(pattern):
        found.append(f"{'' if starts else _ANY}{body}{'' if ends else _ANY}")
    return "|".join(found)


def _branches(pattern: str) -> Iterator[tuple[str, bool, bool]]:
    """Yield (pattern without anchors, begins with ^, ends with $) of each alternative of the whole pattern."""
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
    """Yield (place, character) of each character that has a meaning for the structure, outside escapes and character
    classes.
    """
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


_UNIT = re.compile(r"\\x..|\\u....|\\.|\[\^?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_NOT_IN_JSON = ('"', "\\", *map(chr, range(32)))


def json_text(pattern: str) -> str:
    """Return the pattern for a JSON string in which it is found, without escapes. Raises UnsupportedPattern.

    A part that would match any character does not match one that JSON escapes. A pattern that names such a character is
    not supported.
    """
    found = "".join(_without_escaped(unit) for unit in units(anywhere(pattern)))
    for unit in units(found):
        if unit in "()|*+?{}":
            continue
        try:
            matches = re.compile(unit, re.DOTALL).fullmatch
        except re.error:
            raise UnsupportedPattern(f"{unit!r:.80} in a pattern") from None
        if any(matches(char) for char in _NOT_IN_JSON):
            raise UnsupportedPattern("a pattern for quotation marks, backslashes or control characters")
    return found


def units(pattern: str) -> list[str]:
    """Split a pattern into characters, classes, escapes and operators."""
    return _UNIT.findall(pattern)


def _without_escaped(unit: str) -> str:
    if unit in (".", r"\S", r"\D", r"\W", r"[\s\S]", r"[\S\s]", r"[\d\D]", r"[\w\W]"):
        inside = {r"\S": r"\s", r"\D": "0-9", r"\W": r"\w"}.get(unit, "")
        return rf'[^{inside}"\\\x00-\x1f]'
    return rf'{unit[:-1]}"\\\x00-\x1f]' if unit.startswith("[^") else unit


_CLASS = re.compile(r"\\.|\[(\^?)((?:\\.|[^\]\\])*)\]", re.DOTALL)
_MEMBER = re.compile(r"\\.|.", re.DOTALL)


def without_sets(pattern: str) -> str:
    """Return the pattern for libraries that read ``[``, ``&&``, ``--`` and ``~~`` in a class as operators on sets: here
    they are characters.
    """
    return _CLASS.sub(lambda found: found[0] if found[2] is None else f"[{found[1]}{_members(found[2])}]", pattern)


def _members(inside: str) -> str:
    """Return the members of a class, with a backslash before each that such libraries may read as an operator between
    sets.
    """
    members, written, at = _MEMBER.findall(inside), "", 0
    while at < len(members):
        written += _member(members[at])
        if members[at + 1 : at + 2] == ["-"] and at + 2 < len(members):
            written += f"-{_member(members[at + 2])}"
            at += 2
        at += 1
    return written


def _member(char: str) -> str:
    return f"\\{char}" if char in tuple("[&~-") else char


_QUANTITY = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_WHITESPACE = re.compile(r"(?:[ \n\t\r()|?*+\[\]]|\\[ntr])*")
_CLASS_OF_SPACES = re.compile(r"\[[^\]^]*\]")


def whitespace(pattern: str) -> str:
    """Return the pattern, where it only matches JSON's white space. Raises ValueError."""
    inside = _CLASS_OF_SPACES.sub(lambda found: found[0].replace("\\s", " \\t\\n\\r"), pattern)
    found = inside.replace("\\s", "[ \\t\\n\\r]")
    if not _WHITESPACE.fullmatch(_QUANTITY.sub("", found)):
        raise ValueError("the pattern for white space also matches something else")
    return found
