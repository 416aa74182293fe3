"""Reasoning between tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from ferrule.forms import Fixed, Form, OneOf, Regex, Series, Until
from ferrule.interfaces.parsers import (
    ChoiceContext,
    Content,
    Reasoning,
    ReasoningParser,
    TextDelta,
    ThoughtTags,
)
from ferrule_parsing.behind import behind
from ferrule_parsing.call_probe import CallProbe
from ferrule_parsing.markup import MarkupFilter
from ferrule_parsing.reader import Reader, Tags

_BREAKS = re.compile(r"\n*")
_MOST_BREAKS = Regex(r"\n{0,4}")  # that a constraint allows next to a tag


class ThinkingParser(ReasoningParser):
    """One block ``<open>…<close>`` of reasoning; the text before and after it is content.

    `open_tag` and `close_tag` may be tuples of spellings, of which any opens and any closes the block. None may begin
    with another: how the text is cut would then decide which one it is.

    `begins_inside`: an answer begins inside the block, and may repeat the opening tag. A prompt that ends with the
    opening tag says the same of its answer; one that ends with the closing tag says that the block is over. A prompt
    that no template wrote opens the block only where it ends with the tag.

    A call ends an open block too, where the choice's calls are read: it begins with one of the `call_tags` of the tool
    parser, which must find a call there; else the tag belongs to the thoughts. `ending_tags` are further tags that end
    the block, and are content. `answer_tags` are an opening and a closing tag that may stand around the answer behind
    the block, or without one; they are markup. `dropped_tags` never become content.

    Line breaks next to the tags belong to them, and so does white space before an opening tag at the answer's
    beginning. Everything else survives, tags at other places included. Without a closing tag the block does not end.
    A tag may be a special token of the model, or have some.
    """

    open_tag: str | tuple[str, ...] = "<think>"
    close_tag: str | tuple[str, ...] = "</think>"
    begins_inside: bool = False
    ending_tags: tuple[str, ...] = ()
    answer_tags: tuple[str, str] | None = None

    def __init_subclass__(cls) -> None:
        if "special_tokens" not in vars(cls):
            cls.special_tokens = (
                *(*_spellings(cls.open_tag), *_spellings(cls.close_tag)),
                *(*cls.ending_tags, *(cls.answer_tags or ())),
            )

    def __init__(self) -> None:
        self._open_tags, self._close_tags = _spellings(self.open_tag), _spellings(self.close_tag)
        self._probe: CallProbe | None = None
        self._ends = self.ending_tags  # what ends the block beside the closing tags
        self._closing = _tags((*self._close_tags, *self._ends))
        self._filter = MarkupFilter(self.dropped_tags)
        self._twice = bool({*self.dropped_tags} & {*self._close_tags})
        self._answer_open, self._answer_close = self.answer_tags or ("", "")
        self._reader = Reader()
        self._events: list[Reasoning | Content] = []
        self._state: Callable[[], bool] = self._at_start
        self._inside = self.begins_inside
        self._over = False  # the block came before the output, or does not come
        self._unsaid: list[str] = []  # white space at the beginning, line breaks that a closing tag may follow

    def begin(self, context: ChoiceContext) -> None:
        if context.new_tool_parser is not None:
            self._probe = CallProbe(context.new_tool_parser)
            self._filter.drop(())  # a tag in the arguments of a call is none: who reads the calls drops the others
            self._ends = tuple(dict.fromkeys((*self.ending_tags, *self._probe.tags)))
            self._closing = _tags((*self._close_tags, *self._ends))
        prompt, continued = context.prompt.rstrip(), context.continued
        opened = max(map(continued.rfind, self._open_tags))
        closed = max(map(continued.rfind, self._close_tags))
        if prompt.endswith(self._open_tags) or opened > closed:
            self._inside = True
        elif self._answer_open and prompt.endswith(self._answer_open):
            self._end(self._behind_answer_open)
        elif prompt.endswith(self._close_tags) or continued.strip():
            self._end(self._behind_close)
        elif not context.templated:
            self._inside = False

    def constrain(self, form: Form) -> Form:
        """Return the form with the block of thoughts in front of it, where there is or may be one."""
        if self._answer_open and self._state != self._behind_answer_open:
            around = (Fixed(tag) for tag in (self._answer_open, self._answer_close))
            opening, closing = (Series((part, _MOST_BREAKS)) for part in around)
            form = OneOf((form, Series((opening, form, _MOST_BREAKS, closing))))
        if self._over:
            return form
        thoughts = _before(form, self._close_tags, self._ends)
        if self._inside:
            return thoughts
        opened = tuple(Series((Fixed(tag), thoughts)) for tag in self._open_tags)
        return OneOf((*opened, form))

    def thoughts(self) -> ThoughtTags:
        """Return the tags of the one block of thoughts, which the first spelling of the closing tag ends."""
        return ThoughtTags(
            inside=self._inside,
            opens=() if self._over else self._open_tags,
            closes=(*self._close_tags, *self._ends),
            end=self._close_tags[0],
        )

    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        self._reader.push(delta.text)
        while self._state():
            pass
        return self._take()

    def finish(self) -> Sequence[Reasoning | Content]:
        if self._state == self._at_call:  # nothing says that it is none
            self._end_by_call()
        over = self._state == self._behind_answer
        self._say(("" if over else "".join(self._unsaid)) + self._reader.rest())
        self._unsaid = []
        if not self._inside and (rest := self._filter.flush()):
            self._events.append(Content(rest))
        return self._take()

    # ---- states: each reads what it can, and returns whether the next state has text to read

    def _at_start(self) -> bool:
        self._unsaid.append(self._reader.space())
        if self._reader.empty:
            return False
        opened = self._read_open_tag()
        answers = self._reader.take(self._answer_open) if self._answer_open and not (opened or self._inside) else False
        if opened is None or answers is None:
            return False
        if opened:
            self._open()
        elif answers:
            self._end(self._behind_answer_open)
        else:
            self._state = self._in_thoughts if self._inside else self._before
            self._say("".join(self._unsaid))
        self._unsaid = []
        return True

    def _before(self) -> bool:
        text, tag = self._reader.until(_tags(self._open_tags))
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
        tag = self._read_until(self._closing)
        if tag in self._close_tags:
            self._unsaid = []
            self._end(self._behind_close)
        elif tag:
            self._reader.at -= len(tag)
            if self._probe:
                self._probe.begin()
            self._state = self._at_call
        return bool(tag)

    def _at_call(self) -> bool:
        """Read at a tag that ends the thoughts, unless it begins a call that the tool parser does not find there."""
        calls = self._probe.finds_call(self._reader) if self._probe else True
        if calls:
            self._end_by_call()
        elif calls is False:
            self._say("".join((*self._unsaid, self._reader.text[self._reader.at])))
            self._unsaid = []
            self._reader.at += 1
            self._state = self._in_thoughts
        return calls is not None

    def _end_by_call(self) -> None:
        self._unsaid = []
        self.dropped_tags = (*self.dropped_tags, *self._close_tags)  # what closes the block comes behind the call
        self._end(self._after)

    def _behind_close(self) -> bool:
        self._reader.match(_BREAKS)
        if self._reader.empty:
            return False
        again = self._reader.take_any(_tags(self._close_tags)) if self._twice else ""
        if again:
            return True
        answers = self._reader.take(self._answer_open) if self._answer_open else False
        if answers is None or again is None:
            return False
        self._state = self._behind_answer_open if answers else self._after
        return True

    def _after(self) -> bool:
        self._say(self._reader.rest())
        return False

    def _behind_answer_open(self) -> bool:
        self._reader.match(_BREAKS)
        if self._reader.empty:
            return False
        self._state = self._in_answer
        return True

    def _in_answer(self) -> bool:
        tag = self._read_until(_tags((self._answer_close,)))
        if tag:
            self._unsaid = []
            self._state = self._behind_answer
        return bool(tag)

    def _behind_answer(self) -> bool:
        """Read behind the answer: line breaks at the end are markup; before more text they are not."""
        self._unsaid.append(self._reader.match(_BREAKS))
        if self._reader.empty:
            return False
        self._say("".join(self._unsaid))
        self._unsaid = []
        self._state = self._after
        return True

    # ---- helpers

    def _read_open_tag(self) -> bool | None:
        """Read an opening tag if there is one here. None: more text is needed to decide."""
        undecided = False
        for tag in self._open_tags:
            found = self._reader.take(tag)
            if found:
                return True
            undecided = undecided or found is None
        return None if undecided else False

    def _read_until(self, tags: Tags) -> str:
        """Say the text before the next of `tags`, which is read; line breaks before it wait in `_unsaid`."""
        text, tag = self._reader.until(tags)
        body = text.rstrip("\n")
        if body:
            self._say("".join((*self._unsaid, body)))
            self._unsaid = []
        if len(body) < len(text):
            self._unsaid.append(text[len(body) :])
        return tag

    def _open(self) -> None:
        self._inside = True
        self._state = self._behind_open

    def _end(self, state: Callable[[], bool]) -> None:
        """End the block of thoughts, and continue with `state`."""
        self._inside, self._over = False, True
        self._state = state

    def _say(self, text: str) -> None:
        if not self._inside:
            text = self._filter.feed(text)
        if text:
            self._events.append(Reasoning(text) if self._inside else Content(text))

    def _take(self) -> list[Reasoning | Content]:
        events, self._events = self._events, []
        return events


def _before(form: Form, closes: tuple[str, ...], ends: tuple[str, ...]) -> Form:
    """Return the form of thoughts from behind the opening tag on, then `form`. Without a closing tag, `form` begins
    with the tag that ends the thoughts.
    """
    ways: list[Form] = [Series((Until(closes[0], closes[1:], ends), _MOST_BREAKS, form))]
    for tag in ends:
        rest = behind(form, tag)
        if rest is not None:
            others = tuple(one for one in (*closes, *ends) if one != tag)
            ways.append(Series((Until(tag, without=others), rest)))
    return OneOf(tuple(ways)) if len(ways) > 1 else ways[0]


@lru_cache(maxsize=64)
def _tags(spellings: tuple[str, ...]) -> Tags:
    return Tags(*spellings)


def _spellings(tag: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return a tag's spellings as a tuple. Raises ValueError when there is none, or when one is the beginning of
    another.
    """
    spellings = (tag,) if isinstance(tag, str) else tuple(tag)
    clash = any(one is not other and other.startswith(one) for one in spellings for other in spellings)
    if not spellings or clash:
        raise ValueError(f"the spellings of a tag must not be empty or begin with one another: {spellings}")
    return spellings
