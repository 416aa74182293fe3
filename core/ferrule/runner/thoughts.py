"""The limit on the thoughts of one request: counted by token, and enforced by forcing the tokens that end them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ferrule.types import ThoughtLimit


class ThoughtCounter:
    """A counter of thoughts in the output of one request. `piece` gives the bytes that a token adds to a text.

    The tokens behind the one that completes an opening tag count, those of a closing tag included.
    """

    def __init__(self, limit: ThoughtLimit, piece: Callable[[int], bytes]) -> None:
        self._limit = limit
        self._piece = piece
        self._opens = tuple(text.encode() for text in limit.opens)
        self._closes = tuple(text.encode() for text in limit.closes)
        self._longest = max(map(len, (*self._opens, *self._closes)))
        self._inside = limit.inside
        self._over = False
        self._count = 0
        self._ended = 0  # tokens of the forced end that came
        self._tail = b""  # of the output: what may be the beginning of a tag

    @property
    def forced(self) -> int | None:
        """The token that must come next, None where it is free."""
        if self._inside and self._count >= self._limit.tokens:
            return self._limit.end_ids[self._ended]
        return None

    def accept(self, ids: Sequence[int]) -> None:
        """Follow these tokens of the output."""
        for id in ids:
            if self.forced is not None:
                self._end()
            elif not self._over:
                self._count += self._inside
                self._read(self._piece(id))

    def _end(self) -> None:
        self._ended += 1
        if self._ended == len(self._limit.end_ids):
            self._leave()
            self._ended, self._tail = 0, b""

    def _leave(self) -> None:
        self._inside = False
        self._over = not self._limit.again

    def _read(self, piece: bytes) -> None:
        """Look for tags in the new text and as much of the text before as a tag may begin in."""
        text = self._tail + piece
        while not self._over:
            behind = _behind_first(text, self._closes if self._inside else self._opens)
            if behind is None:
                break
            text = text[behind:]
            if self._inside:
                self._leave()
            else:
                self._inside = True
        self._tail = text[max(0, len(text) - self._longest + 1) :]


def _behind_first(text: bytes, tags: tuple[bytes, ...]) -> int | None:
    """Return where the first of the tags in the text ends, or None."""
    places = [(text.find(tag), len(tag)) for tag in tags]
    found = min((place for place in places if place[0] >= 0), default=None)
    return None if found is None else sum(found)
