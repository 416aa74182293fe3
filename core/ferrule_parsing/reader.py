"""Text that arrives in parts, read up to tags."""

from __future__ import annotations

import re
import sys

_SPACE = re.compile(r"\s*")


class Tags:
    """A fixed set of tags to look for. Where two begin at one place, the longer one counts."""

    __slots__ = ("_beginning", "_pattern", "_prefixes", "longest", "texts")

    def __init__(self, *tags: str) -> None:
        if not tags or not all(tags):
            raise ValueError("there must be at least one tag, and none may be empty")
        ordered = sorted(tags, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)))  # literals only: nothing to go back for
        self._prefixes = frozenset(tag[:length] for tag in tags for length in range(1, len(tag)))
        self._beginning = re.compile("|".join(sorted({re.escape(tag[0]) for tag in tags})))
        self.texts = tuple(ordered)
        self.longest = len(ordered[0])

    def find(self, text: str, at: int, end: int = sys.maxsize) -> re.Match[str] | None:
        """Return the first tag at or behind `at` that is over before `end`."""
        return self._pattern.search(text, at, end)

    def here(self, text: str, at: int) -> str | None:
        """Return the longest tag that stands at `at`: "" for none, None when more text is needed to decide."""
        if len(text) - at < self.longest and (at == len(text) or text[at:] in self._prefixes):
            return None
        found = self._pattern.match(text, at)
        return "" if found is None else found[0]

    def open_end(self, text: str, at: int) -> int:
        """Return where a tag may have begun that the text does not hold whole; the text's length when none can have."""
        begun = self._beginning.search(text, max(at, len(text) - self.longest + 1))
        while begun is not None:
            if text[begun.start() :] in self._prefixes:
                return begun.start()
            begun = self._beginning.search(text, begun.end())
        return len(text)


class Reader:
    """A text that arrives in parts, of which ``text[at:]`` is not read yet. Leave little unread: each `push` copies
    it.
    """

    __slots__ = ("at", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0

    def push(self, text: str) -> None:
        """Append the next part of the text."""
        self.text = self.text[self.at :] + text
        self.at = 0

    @property
    def empty(self) -> bool:
        return self.at == len(self.text)

    def until(self, tags: Tags) -> tuple[str, str]:
        """Return (text before the next tag, the tag) and read both. Without a tag: (the text that surely belongs to
        none, "").
        """
        start = self.at
        found = tags.find(self.text, start)
        if found is not None and tags.here(self.text, found.start()) is not None:
            self.at = found.end()
            return self.text[start : found.start()], found[0]
        self.at = tags.open_end(self.text, start)
        return self.text[start : self.at], ""

    def take(self, tag: str) -> bool | None:
        """Read `tag` and return True if it stands here. None: more text is needed to decide."""
        if self.text.startswith(tag, self.at):
            self.at += len(tag)
            return True
        if len(self.text) - self.at >= len(tag):
            return False
        return None if tag.startswith(self.text[self.at :]) else False

    def take_any(self, tags: Tags) -> str | None:
        """Read the longest of the tags that stands here, and return it: "" for none, None when more text is needed to
        decide.
        """
        found = tags.here(self.text, self.at)
        if found:
            self.at += len(found)
        return found

    def space(self) -> str:
        """Read the white space that stands here."""
        if not self.text[self.at : self.at + 1].isspace():  # mostly there is none
            return ""
        return self.match(_SPACE)

    def past_space(self) -> bool:
        """Read the white space that stands here, and return whether there is text behind it."""
        if self.text[self.at : self.at + 1].isspace():
            self.match(_SPACE)
        return self.at < len(self.text)

    def match(self, pattern: re.Pattern[str]) -> str:
        """Read and return the text that matches here; "" when none does. The pattern is to be a plain class of
        characters.
        """
        found = pattern.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found[0]

    def rest(self) -> str:
        """Read everything."""
        rest = self.text[self.at :]
        self.at = len(self.text)
        return rest
