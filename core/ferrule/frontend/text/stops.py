"""Stop strings, wherever deltas are cut.

Each stop string has an automaton (Knuth, Morris, Pratt) whose state is the length of its longest prefix that the text
ends in. So the work is linear in the text, the first match is found where it ends, and what must be held back is
exactly the longest such prefix: it may still become a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request, shared by its choices."""

    __slots__ = ("strings", "tables")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.tables = tuple(_fallbacks(string) for string in self.strings)


def _fallbacks(string: str) -> list[int]:
    """Return, for each length, the longest proper prefix that is also a suffix of the first `length` characters."""
    table = [0] * (len(string) + 1)
    length = 0
    for end in range(1, len(string)):
        while length and string[end] != string[length]:
            length = table[length]
        if string[end] == string[length]:
            length += 1
        table[end + 1] = length
    return table


class StopMatcher:
    """A matcher of stop strings in one choice's text. `matched` is the stop string that ended the text; feed nothing
    after that. A shallow copy is a fork.

    Of several matches, the one that ends first counts, then the one that the request names first.
    """

    __slots__ = ("_undecided", "_include", "_states", "_stops", "matched")

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._states = [0] * len(stops.strings)
        self._undecided = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be sent: no part of it belongs to a stop string, unless those are included."""
        if not text:
            return ""
        self._states = self._states.copy()
        first_end, winner = len(text) + 1, -1
        for number, string in enumerate(self._stops.strings):
            end = self._advance(number, string, text, first_end)
            if end < first_end:
                first_end, winner = end, number
        buffer = self._undecided + text
        if winner >= 0:
            self.matched = self._stops.strings[winner]
            end = len(self._undecided) + first_end
            self._undecided = ""
            return buffer[: end if self._include else end - len(self.matched)]
        hold = max(self._states)
        cut = len(buffer) - hold
        self._undecided = buffer[cut:]
        return buffer[:cut]

    def finish(self) -> str:
        """Return the text that was held back in case it became a stop string."""
        undecided, self._undecided = self._undecided, ""
        return undecided

    def _advance(self, number: int, string: str, text: str, limit: int) -> int:
        """Return where in `text` this string's first match ends, if before `limit`; otherwise `limit`."""
        state = self._states[number]
        if not state and string[0] not in text:
            return limit
        table = self._stops.tables[number]
        for position, character in enumerate(text, 1):
            while state and string[state] != character:
                state = table[state]
            if string[state] == character:
                state += 1
                if state == len(string):
                    return min(position, limit)
        self._states[number] = state
        return limit
