"""Content and calls to events."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, DroppedTags, Event
from ferrule_parsing.markup import MarkupFilter


class CallWriter:
    """A collector of the events of one choice, which numbers the calls and ends every call that was started.

    White space next to a call is markup and not content, with one exception: where text stands before and behind a
    call, the space behind the call stays, so that the two texts are not glued together. All other space survives.
    """

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        """Create an empty writer. `new_id` makes the ids of calls that have none from the model; by default ``call_``
        and 24 hex digits.
        """
        self._new_id = new_id or _new_id
        self._filter = MarkupFilter()
        self._events: list[Event] = []
        self._space: list[str] = []  # behind the last content, or the last call, and not decided yet
        self._said = False  # there was content
        self._beside = False  # nothing but space since the last call
        self._index = -1
        self._ids: set[str] = set()
        self._open = False

    @property
    def open(self) -> bool:
        """Whether a call was started and is not ended."""
        return self._open

    def drop(self, tags: DroppedTags) -> None:
        """Keep these tags out of the content from here on."""
        self._filter.drop(tags)

    def text(self, text: str) -> None:
        """Write content."""
        self._text(self._filter.feed(text))

    def _text(self, text: str) -> None:
        if self._beside and not self._said:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._events.append(Content("".join((*self._space, body))))
            self._space.clear()
            self._said, self._beside = True, False
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def start(self, name: str, id: str | None = None) -> None:
        """Start a call, after ending an open one. `id`: the model's id of the call, None for a new one."""
        self.end()
        self._text(self._filter.flush())
        self._space.clear()
        self._index += 1
        self._open = self._beside = True
        chosen = id if id and id not in self._ids else self._new_id()  # results of tools name their call by its id
        self._ids.add(chosen)
        self._events.append(CallStart(self._index, chosen, name))

    def arguments(self, fragment: str) -> None:
        """Write the next part of the open call's arguments."""
        if fragment:
            self._events.append(CallArguments(self._index, fragment))

    def end(self) -> None:
        """End the open call, if there is one."""
        if self._open:
            self._open = False
            self._events.append(CallEnd(self._index))

    def drop_space(self) -> None:
        """Drop the space since the last content or call, which was markup."""
        self._space.clear()

    def finish(self) -> None:
        """End the output: end an open call and write the text that was held back."""
        self.end()
        self._text(self._filter.flush())
        if self._space and not self._beside:
            self._events.append(Content("".join(self._space)))
        self._space.clear()

    def take(self) -> list[Event]:
        """Return the events since the last `take`."""
        events, self._events = self._events, []
        return events


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
