"""Values between tags that may hold such tags themselves, as in a file about the format that they are written in."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from ferrule_parsing.reader import Reader, Tags

_LOOK = 512  # characters behind a tag that may say whether it ends the value
_DRIFT = re.compile(r"[^\s<>]{0,16}(>?)")
_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"\s{0,16}([^\s<>\"'=]{0,256})")


@dataclass(frozen=True)
class ValueTags:
    """The tags in and around a value. `end`: the tag that ends a value. `key`: the beginning of the next argument.
    `open` and `close`: the tags that a call may begin and end with. `lines`: a line may end the value, too.
    """

    end: str
    key: str
    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    lines: bool = True


class Says(Enum):
    """A tag's meaning within a value."""

    ENDS = auto()
    MAY_END = auto()  # unless another one ends the value
    NOTHING = auto()


class ValueReader:
    """The text of one value. `given`: names of the arguments that came. `known`: names that there are, empty for all.

    A tag ends the value if another argument or the end of the call follows; a misspelt one (``</parameter1>``) does,
    too. A line may also begin with another argument. A tag that only may end the value does so if no other one ends it:
    what follows is held back till then. Calls that begin in the value end in it.
    """

    def __init__(self, tags: ValueTags, given: Collection[str], known: Collection[str]) -> None:
        self._tags = tags
        self._given, self._known = given, known
        self._depth = 0  # calls that began in the value
        self._held: list[str] | None = None  # what follows the first tag that may end the value

    def read(self, reader: Reader) -> tuple[str, bool]:
        """Return (the next text of the value, whether the value ends with it)."""
        said: list[str] = []
        while True:
            text, tag = reader.until(_tags(self._tags))
            self._say(text, said)
            if not tag:
                return "".join(said), False
            start, says = reader.at - len(tag), self._ask(reader, tag)
            if says is None:
                reader.at = start
                return "".join(said), False
            if says is Says.ENDS:
                said += self._held or ()
                return "".join(said), True
            read = reader.text[start : reader.at]
            if says is Says.MAY_END and self._held is None:
                self._held = []
            self._say(read, said)

    def resume(self, reader: Reader) -> bool:
        """Return whether the value ended at a tag that may end it, when the output is over; what follows is unread
        again.
        """
        held = "".join(self._held or ()) + reader.rest()
        ended = held.startswith(self._tags.end)
        reader.push(held[len(self._tags.end) if ended else held.startswith("\n") :])
        return ended or self._held is not None

    def _say(self, text: str, said: list[str]) -> None:
        if text:
            (said if self._held is None else self._held).append(text)

    def _ask(self, reader: Reader, tag: str) -> Says | None:
        """Return what the tag that was read means, given the text behind it. None: more text is needed to decide."""
        if tag in self._tags.open:
            self._depth += 1
            return Says.NOTHING
        if tag.lstrip("\n") in self._tags.close:
            nested = self._depth > 0
            self._depth -= nested
            return Says.MAY_END if self._tags.lines and not nested else Says.NOTHING
        if tag[0] != "\n":
            return self._behind_closer(reader)
        reader.at -= len(tag) - 1
        new = self._new_key(reader.text, reader.at, self._known)
        return None if new is None else Says.ENDS if new and not self._depth else Says.NOTHING

    def _behind_closer(self, reader: Reader) -> Says | None:
        text, at = reader.text, reader.at
        last = ">" if self._tags.end.endswith(">") else ""
        exact = text.startswith(last, at)
        drift = _DRIFT.match(text, at, at + _LOOK)
        end = at + len(last) if exact or drift is None else drift.end()
        if exact and not self._tags.close:
            reader.at = end
            return Says.ENDS
        space = _SPACE.match(text, end, at + _LOOK)
        behind = space.end() if space else end
        if behind == len(text) and behind < at + _LOOK:
            return None
        closes = _any_here(text, behind, self._tags.close)
        key = self._new_key(text, behind)
        if closes is None or key is None:
            return None
        reader.at = end if exact or closes or key else at
        if not self._depth:
            return Says.ENDS if closes or key else Says.MAY_END if exact else Says.NOTHING
        if closes:
            reader.at = behind + len(closes)
            self._depth -= 1
        return Says.MAY_END if closes else Says.NOTHING

    def _new_key(self, text: str, at: int, known: Collection[str] = ()) -> bool | None:
        """Return whether an argument that has not come yet begins here. None: more text is needed to decide."""
        begins = _here(text, at, self._tags.key)
        if not begins:
            return begins
        start = at + len(self._tags.key)
        name = _KEY.match(text, start)
        end = name.end() if name else start
        if end == len(text):
            return None
        key = name[1] if name else ""
        return key not in self._given and (not known or key in known)


def _any_here(text: str, at: int, tags: tuple[str, ...]) -> str | None:
    """Return the tag that stands here, "" for none. None: more text is needed to decide."""
    found = [_here(text, at, tag) for tag in tags]
    return tags[found.index(True)] if True in found else None if None in found else ""


def _here(text: str, at: int, tag: str) -> bool | None:
    """Return whether a tag stands here. None: more text is needed to decide."""
    found = text[at : at + len(tag)]
    return found == tag or (None if tag.startswith(found) else False)


@lru_cache(maxsize=64)
def _tags(tags: ValueTags) -> Tags:
    lines = (f"\n{tag}" for tag in (tags.key, *tags.close) if tags.lines)
    return Tags(tags.end.removesuffix(">"), *lines, *tags.open, *tags.close)
