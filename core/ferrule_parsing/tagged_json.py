"""Tool calls between tags, each a JSON object with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from ferrule.interfaces.parsers import ChoiceContext, Event, TextDelta, ToolParser
from ferrule.types import Fixed, Form, GrammarSpec, Json, OneOf, Regex, Repeated, Series, Tag, Triggered
from ferrule_parsing.calls import CallWriter
from ferrule_parsing.choice import EnforcedFunction, enforced
from ferrule_parsing.json_object import MemberText, ObjectReader, unquote
from ferrule_parsing.reader import Reader, Tags


class TaggedJsonParser(ToolParser):
    """Calls as ``<open>{"name": "f", "arguments": {…}}<close>``, with white space anywhere between the parts.

    A call starts as soon as its name is known; arguments follow as they come, as they were written. When they come
    before the name they wait for it. Of keys that come twice the first counts, others are left out.

    Text that is not such an object is content, tags included. What breaks off after the name stays a call with the
    arguments that came; what follows a broken place is content again. A missing closing tag changes nothing.
    """

    open_tag: str
    close_tag: str
    name_key: str = "name"
    arguments_key: str = "arguments"

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tools)
        self._out = CallWriter()
        self._parallel = True
        self._reader = Reader()
        self._state: Callable[[], bool] = self._in_text
        self._unclosed = False  # the closing tag of the last call has not come
        self._raw: list[str] = []  # of a call without a name yet, tag included
        self._object = ObjectReader()
        self._name: list[str] = []
        self._named = False
        self._unsent: list[str] = []  # arguments before the name is known, or that are not an object
        self._began = self._whole = self._streams = False  # arguments: seen, complete, an object

    def begin(self, context: ChoiceContext) -> None:
        self._parallel = context.parallel_tool_calls

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        """Calls as the class's docstring shows them, each on a line of its own."""
        functions = enforced(self.tools, choice)
        if not functions:
            return None
        inside = Series((_BREAK, OneOf(tuple(map(self._call, functions))), _BREAK))
        most = 1 if isinstance(choice, dict) or not self._parallel else None
        if choice == "auto":
            return GrammarSpec(form=Triggered(self.open_tag, (Tag(self.open_tag, inside, self.close_tag),), most))
        call = Series((Fixed(self.open_tag), inside, Fixed(self.close_tag)))
        return GrammarSpec(form=Repeated(call, "\n", 1, most))

    def _call(self, function: EnforcedFunction) -> Form:
        name, arguments = json.dumps(self.name_key), json.dumps(self.arguments_key)
        begin = f"{{{name}: {json.dumps(function.name, ensure_ascii=False)}, {arguments}: "
        return Series((Fixed(begin), Json(function.schema), Fixed("}")))

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        self._reader.push(delta.text)
        while self._state():
            pass
        return self._out.take()

    def finish(self) -> Sequence[Event]:
        rest = self._reader.rest()
        if self._state == self._in_text:
            markup = self._unclosed and self.close_tag.startswith(rest)
            self._out.text("" if markup else rest)
        elif self._named:
            self._out.arguments("".join(self._unsent))
        else:
            self._out.text("".join(self._raw) + rest)
        self._out.finish()
        return self._out.take()

    # ---- states: each reads what it can, and says whether the next one has something to read

    def _in_text(self) -> bool:
        tags = (self.open_tag, self.close_tag) if self._unclosed else (self.open_tag,)
        before, tag = self._reader.until(_tags(*tags))
        self._out.text(before)
        if tag == self.open_tag:
            self._raw = [tag]
            self._unclosed = False
            self._state = self._behind_tag
        elif tag:
            self._out.drop_space()
            self._unclosed = False
        return bool(tag)

    def _behind_tag(self) -> bool:
        self._raw.append(self._reader.space())
        if self._reader.empty:
            return False
        if not self._reader.text.startswith("{", self._reader.at):
            self._give_up()
            return True
        self._object = ObjectReader()
        self._name, self._unsent = [], []
        self._named = self._began = self._whole = self._streams = False
        self._state = self._in_object
        return True

    def _in_object(self) -> bool:
        reader, start = self._reader, self._reader.at
        reader.at = self._object.feed(reader.text, start)
        if not self._named:
            self._raw.append(reader.text[start : reader.at])
        for member in self._object.take():
            self._read(member)
        if self._object.done and self._named and not self._began:
            self._out.arguments("{}")
        if self._object.done or self._object.failed:
            self._give_up()
            return True
        return False

    def _give_up(self) -> None:
        """Back to text. A call that has its name ends; what has none is content."""
        if self._named:
            self._out.arguments("".join(self._unsent))
            self._out.end()
            self._unclosed = True
        else:
            self._out.text("".join(self._raw))
        self._raw, self._unsent = [], []
        self._named = False
        self._state = self._in_text

    # ---- members

    def _read(self, member: MemberText) -> None:
        if member.key == self.name_key and not self._named:
            self._name.append(member.text)
            if member.last:
                name = unquote("".join(self._name))
                self._name = []
                if name:
                    self._start(name)
        elif member.key == self.arguments_key and not self._whole:
            self._read_arguments(member)

    def _start(self, name: str) -> None:
        self._named = True
        self._raw = []
        self._out.start(name)
        self._release()

    def _read_arguments(self, member: MemberText) -> None:
        if not self._began:
            self._began = True
            self._streams = member.text.startswith("{")
        self._whole = member.last
        self._unsent.append(member.text)
        if self._named:
            self._release()

    def _release(self) -> None:
        """Hand on what waits: of an object what there is; else, when it is whole, a string as its text, null as {}."""
        if not self._streams and not self._whole:
            return
        text = "".join(self._unsent)
        self._unsent = []
        if not self._streams:
            text = "{}" if text == "null" else unquote(text) or text
        self._out.arguments(text)


_BREAK = Regex(r"\n?")


@lru_cache(maxsize=64)
def _tags(*tags: str) -> Tags:
    return Tags(*tags)
