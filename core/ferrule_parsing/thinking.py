"""Thoughts between tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from ferrule.interfaces.parsers import ChoiceContext, Content, Reasoning, ReasoningParser, TextDelta
from ferrule_parsing.reader import Reader, Tags

_BREAKS = re.compile(r"\n*")


class ThinkingParser(ReasoningParser):
    """One block ``<open>…<close>``; what stands before and behind it is content.

    `begins_inside`: an answer begins inside the block, and may repeat the opening tag. A prompt that ends with the
    opening tag says the same of its answer; one that ends with the closing tag says that the block is over.

    Line breaks next to the tags belong to them, and so does white space before an opening tag at the answer's
    beginning. Everything else survives, tags at other places included. Without a closing tag the block does not end.
    """

    open_tag: str = "<think>"
    close_tag: str = "</think>"
    begins_inside: bool = False

    def __init__(self) -> None:
        self._reader = Reader()
        self._events: list[Reasoning | Content] = []
        self._state: Callable[[], bool] = self._at_start
        self._inside = self.begins_inside
        self._held: list[str] = []  # white space at the beginning, line breaks at the end of thoughts

    def begin(self, context: ChoiceContext) -> None:
        prompt, continued = context.prompt.rstrip(), context.continued
        opened, closed = continued.rfind(self.open_tag), continued.rfind(self.close_tag)
        if prompt.endswith(self.open_tag) or opened > closed:
            self._inside = True
        elif prompt.endswith(self.close_tag) or continued.strip():
            self._inside = False
            self._state = self._behind_close

    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        self._reader.push(delta.text)
        while self._state():
            pass
        return self._take()

    def finish(self) -> Sequence[Reasoning | Content]:
        self._say("".join(self._held) + self._reader.rest())
        self._held = []
        return self._take()

    # ---- states: each reads what it can, and says whether the next one has something to read

    def _at_start(self) -> bool:
        self._held.append(self._reader.space())
        if self._reader.empty:
            return False
        opened = self._reader.take(self.open_tag)
        if opened is None:
            return False
        if opened:
            self._open()
        else:
            self._state = self._in_thoughts if self._inside else self._before
            self._say("".join(self._held))
        self._held = []
        return True

    def _before(self) -> bool:
        text, tag = self._reader.until(_tags(self.open_tag))
        self._say(text)
        if tag:
            self._open()
        return bool(tag)

    def _behind_open(self) -> bool:
        self._reader.match(_BREAKS)
        if self._reader.empty:
            return False
        self._state = self._in_thoughts
        return True

    def _in_thoughts(self) -> bool:
        text, tag = self._reader.until(_tags(self.close_tag))
        body = text.rstrip("\n")
        if body:
            self._say("".join((*self._held, body)))
            self._held = []
        if len(body) < len(text):
            self._held.append(text[len(body) :])
        if tag:
            self._held = []
            self._inside = False
            self._state = self._behind_close
        return bool(tag)

    def _behind_close(self) -> bool:
        self._reader.match(_BREAKS)
        if self._reader.empty:
            return False
        self._state = self._after
        return True

    def _after(self) -> bool:
        self._say(self._reader.rest())
        return False

    # ---- parts

    def _open(self) -> None:
        self._inside = True
        self._state = self._behind_open

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text) if self._inside else Content(text))

    def _take(self) -> list[Reasoning | Content]:
        events, self._events = self._events, []
        return events


@lru_cache(maxsize=64)
def _tags(tag: str) -> Tags:
    return Tags(tag)
