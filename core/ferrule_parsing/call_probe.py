"""Whether a call begins at a tag that stands in thoughts."""

from __future__ import annotations

from collections.abc import Callable

from ferrule.interfaces.parsers import CallStart, TextDelta, ToolParser
from ferrule_parsing.reader import Reader

_LOOK, _LONGEST_LOOK = 32, 1024  # characters that are read at once, and at most
_MOST_LOOKS = 100  # tags that may turn out not to begin a call; behind them, none does


class CallProbe:
    """A check of whether a call begins at a tag, made by a tool parser; `new` makes a parser for each tag. `tags`: the
    tags with which calls begin.
    """

    def __init__(self, new: Callable[[], ToolParser]) -> None:
        self._new = new
        self._parser = new()
        self._looks = self._seen = 0  # tags so far, and characters of the last one that were read
        self.tags = self._parser.call_tags

    def begin(self) -> None:
        """Prepare to look at another tag."""
        self._parser = self._new()
        self._looks, self._seen = self._looks + 1, 0

    def finds_call(self, reader: Reader) -> bool | None:
        """Return whether the unread text begins with a call. None: more text is needed to decide. Nothing is read."""
        if self._looks > _MOST_LOOKS:
            return False
        while self._seen < _LONGEST_LOOK:
            start = reader.at + self._seen
            text = reader.text[start : start + _LOOK]
            if not text:
                return None
            self._seen += len(text)
            for event in self._parser.feed(TextDelta(text)):
                return isinstance(event, CallStart)
        return True
