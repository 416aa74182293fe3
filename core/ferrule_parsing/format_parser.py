"""`FormatParser`: the tool parser of a described format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from ferrule.forms import GrammarSpec
from ferrule.interfaces.parsers import ChoiceContext, DroppedTags, Event, TextDelta, ToolParser
from ferrule.structured_outputs.calls import enforced
from ferrule_parsing.calls import CallWriter
from ferrule_parsing.formats import CallReader, ToolFormat
from ferrule_parsing.reader import Reader

# Calls of a choice: a megabyte may hold 150,000, which are seconds of work for the parser and for clients.
_MOST_CALLS = 10_000
_MOST_LATE = 16
_MOST_RESUMED = 16  # calls of which the end of the output says where they ended


class FormatParser(ToolParser):
    """A parser of calls in the format that `format` describes; a subclass names the format.

    A call starts as soon as its name is known, and its arguments follow as they come. Text that is not a call is
    content, with tags that are plain text; where the format has special tokens, its tags never become content. A call
    that breaks off after its name stays a call with the arguments that came; what follows a broken place is content
    again. A missing closing tag changes nothing. After 10,000 calls everything is content.
    """

    format: ToolFormat
    new_id: Callable[[], str] | None = None  # makes the id of a call, None: as usual

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tools)
        self.call_tags = self.format.call_tags
        self._dropped: DroppedTags = self.format.markup(self.special_tokens)
        self._closing_tags: tuple[str, ...] = ()  # of thoughts
        self._out = CallWriter(self.new_id)
        self._out.drop(self._dropped)
        self._reader = Reader()
        self._state: Callable[[], bool] = self._at_start if "" in self.format.open else self._in_text
        self._choice: str | dict[str, Any] = "auto"
        self._parallel = True
        self._schemas = {one["name"]: one.get("parameters") or {} for one in _functions(tools)}
        self._unclosed = False  # the closing tag of the last block has not come
        self._unmarked = False  # the block has no opening tag
        self._bracket = 0  # of the block: 0 before the opening one, 1 behind it, 2 behind the closing one
        self._answer: CallWriter | None = None  # of all but the echo of a block, which is being read
        self._late = 0  # a block began that has no list of calls: so many next brackets may begin the list
        self._found = False  # the block has a call
        self._broken = False  # the last call broke off, so that only markup is expected behind it
        self._raw: list[str] = []  # what was read since the block began or its last call ended
        self._call: CallReader | None = None
        self._calls = 0

    def begin(self, context: ChoiceContext) -> None:
        self._dropped = (*self._dropped, *context.dropped_tags)
        self._closing_tags = context.closing_tags
        self._out.drop(self._dropped)
        self._parallel = context.parallel_tool_calls
        self._choice = context.tool_choice or "auto"

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        return self._constraint(self.format, choice)

    def _constraint(self, format: ToolFormat, choice: str | dict[str, Any]) -> GrammarSpec | None:
        """Return the constraint for calls in `format`, for parsers that write calls in another format than the first
        one that they read.
        """
        functions = enforced(self.tools, choice)
        if not functions:
            return None
        most = 1 if isinstance(choice, dict) or not self._parallel else None
        return format.constraint(functions, most=most, required=choice != "auto")

    @cached_property
    def _exact(self) -> frozenset[str]:
        """The functions whose arguments are sure to fit their schema, because they are constrained."""
        functions = enforced(self.tools, self._choice)
        if not functions or self.constraint(self._choice) is None:
            return frozenset()
        strict = {one["name"] for one in _functions(self.tools) if one.get("strict")}
        return frozenset(one.name for one in functions if self._choice != "auto" or one.name in strict)

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        self._reader.push(delta.text)
        while self._state():
            pass
        return (self._answer or self._out).take()

    def finish(self) -> Sequence[Event]:
        for _ in range(_MOST_RESUMED):
            if self._call is None or not self._call.named or not self._call.resume(self._reader, self._out):
                break
            while self._state():
                pass
        rest = self._reader.rest()
        if self._call is not None and self._call.named:
            self._call.finish(self._out)
        elif self._call is not None or not self._found:
            markup = self._unclosed and any(tag.startswith(rest) for tag in self.format.close)
            self._out.text("".join(self._raw) + ("" if markup else rest))
        self._out = self._answer or self._out
        self._out.finish()
        return self._out.take()

    # ---- states: each reads what it can, and says whether the next one has something to read

    def _at_start(self) -> bool:
        """Read the start of the output, where only white space has come so far."""
        self._raw.append(self._reader.space())
        if self._reader.empty:
            return False
        begins = self._begins_unmarked()
        if begins is None:
            return False
        if begins:
            self._enter("".join(self._raw), unmarked=True)
        else:
            self._out.text("".join(self._raw))
            self._raw = []
            self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        tags = self.format.unclosed_tags if self._unclosed else self.format.text_tags
        if self._late:
            tags = self.format.late_tags
        if tags is None:
            self._out.text(self._reader.rest())
            return False
        before, tag = self._reader.until(tags)
        self._out.text(before)
        if tag in self.format.open and tag:
            own = any(tag == syntax.start for syntax in self.format.calls)
            self._reader.at -= len(tag) if own else 0
            self._enter("" if own else tag, unmarked=False)
            self._bracket = int(self.format.brings_bracket(tag))
        elif tag and self._late and tag == self.format.edges[0]:
            self._enter(tag, unmarked=True)
            self._bracket = 1
        elif tag:
            self._out.drop_space()
            self._unclosed = False
        return bool(tag)

    def _between(self) -> bool:
        """Read in a block, before or behind a call."""
        self._raw.append(self._reader.space())
        if self._reader.empty:
            return False
        for read in (self._close, self._bracket_or_mark, *(() if self._broken else (self._start_call,))):
            found = read()
            if found is None:
                return False
            if found:
                self._broken = False
                return True
        self._leave()
        return True

    def _in_call(self) -> bool:
        call, start = self._call, self._reader.at
        if call is None:
            return False
        named = call.named
        call.read(self._reader, self._out)
        if not named:
            self._raw.append(self._reader.text[start : self._reader.at])
        if not (call.done or call.failed):
            return False
        self._found = self._found or call.named
        if not call.named:
            self._leave()
            return True
        self._out.end()
        self._raw, self._call = [], None
        self._calls += 1
        self._broken = call.failed
        if call.unread:
            self._raw = [call.unread]
            self._leave()
            return True
        if self._closing_tags:
            self._out.drop((*self._dropped, *self._closing_tags))
        self._state = self._between
        return True

    # ---- parts of a block

    def _begins_unmarked(self) -> bool | None:
        text, at = self._reader.text, self._reader.at
        tags = self.format.text_tags
        tag = "" if tags is None else tags.here(text, at)
        if tag != "":
            return None if tag is None else False
        if self.format.brackets is not None:
            before = self.format.edges[0]
            if text.startswith(before, at):
                return True
            return None if before.startswith(text[at : at + len(before)]) else False
        found = [syntax.begins(text, at) for syntax in self.format.calls]
        return True if True in found else None if None in found else False

    def _enter(self, raw: str, *, unmarked: bool) -> None:
        self._raw, self._unmarked = [raw], unmarked
        self._bracket, self._found, self._unclosed = 0, False, False
        self._state = self._between

    def _leave(self) -> None:
        """Return to reading text. Text that was read since the last call is content."""
        if self._answer is not None:  # this was an echo
            self._out, self._answer = self._answer, None
        self._unclosed = self._found and bool(self.format.close)
        marked = self.format.brackets is not None and not self._unmarked and self._bracket == 0
        self._late = 0 if self._found else _MOST_LATE if marked else max(0, self._late - 1)
        self._out.text("".join(self._raw))
        self._raw, self._call = [], None
        self._found = self._broken = False
        self._state = self._in_text

    def _close(self) -> bool | None:
        tags = self.format.close_tags
        found = "" if tags is None else self._reader.take_any(tags)
        if not found:
            return None if found is None else False
        self._raw = [] if self._found else [*self._raw, found]
        echoed = self.format.echoed and self._found and self._answer is None
        self._leave()
        self._unclosed = False
        self._state = self._behind_block if echoed else self._in_text
        return True

    def _behind_block(self) -> bool:
        """Read the text behind a block, where the same calls may be written once more."""
        self._raw.append(self._reader.space())
        begins = None if self._reader.empty else self._begins_unmarked()
        if begins is None:
            return False
        if begins:
            self._enter("".join(self._raw), unmarked=True)
            self._out, self._answer = CallWriter(), self._out
        else:
            self._out.text("".join(self._raw))
            self._raw, self._state = [], self._in_text
        return True

    def _bracket_or_mark(self) -> bool | None:
        tags = self.format.marks[self._bracket, self._found]
        found = "" if tags is None else self._reader.take_any(tags)
        if not found:
            return None if found is None else False
        self._raw = [] if self._found and found not in self.format.separators else [*self._raw, found]
        self._bracket += found == self.format.edges[self._bracket]
        return True

    def _start_call(self) -> bool | None:
        if self._bracket == 2 or self._calls == _MOST_CALLS:
            return False
        undecided = False
        for syntax in self.format.calls:
            found = syntax.begins(self._reader.text, self._reader.at)
            if found:
                self._call = syntax.reader(self._schemas, self._exact, unmarked=self._unmarked)
                self._call.in_block(self.format.call_tags, self.format.close)
                self._state = self._in_call
                return True
            undecided = undecided or found is None
        return None if undecided else False


def _functions(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [tool.get("function") or {} for tool in tools]
    return [one for one in found if one.get("name")]
