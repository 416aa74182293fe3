"""Leaves markup out of text that arrives in parts."""

from __future__ import annotations

from functools import lru_cache

from ferrule.interfaces.parsers import DroppedTags
from ferrule_parsing.reader import Reader, Tags

_LONGEST = 128  # characters between the two tags of a pair; more are not markup


class MarkupFilter:
    """A filter that removes tags from a text. A part that may be the beginning of a tag is held back."""

    def __init__(self, tags: DroppedTags = ()) -> None:
        self._reader = Reader()
        self.drop(tags)

    def drop(self, tags: DroppedTags) -> None:
        """Remove these tags from here on."""
        self._tags, self._ends = _prepared(tuple(tags))
        self._alone = frozenset(one for one in tags if isinstance(one, str))

    def feed(self, text: str) -> str:
        """Return the content that new text brings."""
        if self._tags is None:
            return self.flush() + text
        self._reader.push(text)
        kept: list[str] = []
        tag = "?"
        while tag:
            before, tag = self._reader.until(self._tags)
            kept.append(before)
            if tag in self._ends:
                found = self._closed(self._ends[tag])
                if found is None:
                    self._reader.at -= len(tag)
                    break
                kept.append("" if found or tag in self._alone else tag)
        return "".join(kept)

    def flush(self) -> str:
        """Return the text that was held back, without the tags in it that are dropped alone.

        No longer tag and no pair can follow, so a tag that begins one may stand in this text.
        """
        text = self._reader.rest()
        for tag in self._tags.texts if text and self._tags else ():
            text = text.replace(tag, "") if tag in self._alone else text
        return text

    def _closed(self, end: str) -> bool | None:
        """Read up to the end of a pair. None: more text is needed to say whether there is one."""
        text, start = self._reader.text, self._reader.at
        at = text.find(end, start, start + _LONGEST)
        if at < 0:
            return False if len(text) - start >= _LONGEST else None
        self._reader.at = at + len(end)
        return True


@lru_cache(maxsize=256)
def _prepared(tags: DroppedTags) -> tuple[Tags | None, dict[str, str]]:
    ends = dict(one for one in tags if not isinstance(one, str))
    texts = (*(one for one in tags if isinstance(one, str)), *ends)
    return (Tags(*texts) if texts else None), ends
