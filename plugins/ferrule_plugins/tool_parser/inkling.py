"""`inkling`: calls of Inkling, each a message that names its kind.

    <|message_model|>get_weather<|content_invoke_tool_json|>{"name":"get_weather","args":{"city":"Lisbon"}}<|end_message|>
    <|message_model|><|content_text|>I ask.<|end_message|><|content_model_end_sampling|>

The prompt ends with the first tag. The name in front of the mark of a call may be missing.
https://github.com/vllm-project/vllm and https://github.com/sgl-project/sglang, their parsers `inkling`
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ferrule.forms import Fixed, Form, GrammarSpec, Json, OneOf, Series
from ferrule.interfaces.parsers import Event, TextDelta
from ferrule_parsing import CallReader, CallWriter, EnforcedFunction, FormatParser, JsonCall, Reader, Tags, ToolFormat
from ferrule_parsing.formats import Schemas

MESSAGE, TEXT, END, END_SAMPLING = (
    "<|message_model|>",
    "<|content_text|>",
    "<|end_message|>",
    "<|content_model_end_sampling|>",
)
CALL = "<|content_invoke_tool_json|>"
_OTHERS = ("<|content_invoke_tool_text|>", "<|content_tool_error|>")  # kinds of messages that are shown as text
_NAME = re.compile(r"[\w.-]*")
_FIRST = re.compile(r"[\w.-]")
_LONGEST = 256  # characters of a name


class _InklingCall(JsonCall):
    """A call: the text behind its mark, after a name that stood in front of the mark."""

    def begins(self, text: str, at: int) -> bool:
        return super().begins(text, at) or _FIRST.match(text, at) is not None

    def reader(self, schemas: Schemas, exact: frozenset[str], *, unmarked: bool) -> CallReader:
        return _CallReader(super().reader(schemas, exact, unmarked=unmarked))

    def form(self, function: EnforcedFunction) -> Form:
        name = json.dumps(function.name, ensure_ascii=False)
        return Series((Fixed(f'{{"name":{name},"args":'), Json(function.schema), Fixed("}")))


class _CallReader(CallReader):
    """A reader of an object behind a name that means nothing."""

    def __init__(self, call: CallReader) -> None:
        self._call = call
        self._begun = False

    def read(self, reader: Reader, out: CallWriter) -> None:
        if not self._begun:
            reader.match(_NAME)
            if not reader.past_space():
                return
            self._begun, self.failed = True, not reader.text.startswith("{", reader.at)
        if not self.failed:
            self._call.read(reader, out)
            self.named, self.done, self.failed = self._call.named, self._call.done, self._call.failed

    def finish(self, out: CallWriter) -> None:
        self._call.finish(out)


class _InklingMessage(_InklingCall):
    """A call with all that surrounds it. The prompt may have the first tag."""

    def form(self, function: EnforcedFunction) -> Form:
        header = function.name if _NAME.fullmatch(function.name) else ""
        begin = OneOf((Fixed(MESSAGE + header + CALL), Fixed(header + CALL)))
        return Series((begin, super().form(function), Fixed(END)))


class Inkling(FormatParser):
    conformance = "ferrule_testkit.samples.tool_parser:INKLING"
    special_tokens = (MESSAGE, TEXT, CALL, END, END_SAMPLING, *_OTHERS)
    format = ToolFormat(open=(CALL,), close=(END,), calls=(_InklingCall(arguments_keys=("args",)),))
    enforced_format = ToolFormat(between="", calls=(_InklingMessage(),))

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tools)
        self._headers = _Headers()

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        return self._constraint(self.format if choice == "auto" else self.enforced_format, choice)

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        return super().feed(replace(delta, text=self._headers.feed(delta.text)))

    def finish(self) -> Sequence[Event]:
        return (*super().feed(TextDelta(self._headers.rest())), *super().finish())


class _Headers:
    """A filter that puts names behind the mark of a call, where they stood in front of it."""

    _begins = Tags(MESSAGE, END)

    def __init__(self) -> None:
        self._reader = Reader()
        self._at_header = True

    def feed(self, text: str) -> str:
        """Return the text to read of new text. A part that may be a name is held back."""
        self._reader.push(text)
        found: list[str] = []
        while not self._reader.empty:
            if self._at_header:
                name = self._name()
                if name is None:
                    break
                found.append(name)
                self._at_header = False
            before, tag = self._reader.until(self._begins)
            found += (before, tag)
            self._at_header = bool(tag)
            if not tag:
                break
        return "".join(found)

    def rest(self) -> str:
        """Return the text that was held back, at the end of the output."""
        return self._reader.rest()

    def _name(self) -> str | None:
        """Return the name that stands here, behind the mark of a call if there is one. None: more text is needed."""
        start = self._reader.at
        name = self._reader.match(_NAME)
        marked = False if len(name) > _LONGEST else None if self._reader.empty else self._reader.take(CALL)
        if marked is None:
            self._reader.at = start
            return None
        return CALL + name if marked else name
