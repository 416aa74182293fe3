"""`openai`: tool calls of gpt-oss, messages to a recipient in OpenAI's Harmony format.

https://cookbook.openai.com/articles/openai-harmony, chat template of https://huggingface.co/openai/gpt-oss-20b
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ferrule.forms import Fixed, Form, GrammarSpec, Json, OneOf, Regex, Series, Tag, Triggered
from ferrule.interfaces.parsers import Event, TextDelta, ToolParser
from ferrule_parsing import CallWriter, EnforcedFunction, HarmonyReader, ObjectReader, enforced
from ferrule_parsing.harmony import CHANNEL, CONSTRAIN, FUNCTION_CALL, MESSAGE, SPECIAL_TOKENS, Body, Head, Part, Tail

_FUNCTIONS = "functions."
# Between the recipient and the message: the channel, if the recipient stands in front of it, and the type.
_BEHIND_RECIPIENT = rf"({re.escape(CHANNEL)}commentary)?( ?({re.escape(CONSTRAIN)})?json)?"


class OpenAIToolParser(ToolParser):
    """``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>``.

    The text of all other messages is content. The model ends its output behind a call, so an enforced output is one.
    """

    conformance = "ferrule_testkit.samples.tool_parser:OPENAI"
    special_tokens = SPECIAL_TOKENS

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tools)
        self._names = {(tool.get("function") or {}).get("name") for tool in tools}
        self._reader = HarmonyReader()
        self._out = CallWriter()
        self._object = ObjectReader()  # the arguments of the open call
        self._empty = True  # there are none yet

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        """Return the constraint for one call; with "auto", for a call wherever a message is addressed to a function."""
        functions = enforced(self.tools, choice)
        if not functions:
            return None
        if choice == "auto":
            return GrammarSpec(form=Triggered((FUNCTION_CALL,), tuple(map(_addressed, functions))))
        return GrammarSpec(form=OneOf(tuple(map(_call, functions))))

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        return self._events(self._reader.feed(delta.text))

    def finish(self) -> Sequence[Event]:
        """Return the last events. Behind complete arguments, text that was held back is the beginning of a tag, and is
        dropped.
        """
        events = self._events(self._reader.finish() if not self._complete else ())
        self._out.finish()
        return [*events, *self._out.take()]

    @property
    def _complete(self) -> bool:
        return self._out.open and self._object.done

    def _events(self, parts: Sequence[Part]) -> list[Event]:
        for part in parts:
            match part:
                case Head(recipient=str(recipient)) if self._is_function(recipient):
                    self._out.start(recipient.removeprefix(_FUNCTIONS))
                    self._object, self._empty = ObjectReader(), True
                case Body(text) if self._out.open:
                    self._out.arguments(text)
                    self._object.feed(text.lstrip() if self._empty else text)
                    self._object.take()  # as they were written is all that is wanted
                    self._empty = self._empty and not text.strip()
                case Body(text):
                    self._out.text(text)
                case Tail(raw) if self._out.open:
                    if raw and self._empty:
                        self._out.arguments("{}")
                    self._out.end()
        return self._out.take()

    def _is_function(self, recipient: str) -> bool:
        """Return whether a recipient is a function, and not a tool that the model was trained with, such as
        "python".
        """
        return len(recipient) > len(_FUNCTIONS) and recipient.startswith(_FUNCTIONS) or recipient in self._names


def _call(function: EnforcedFunction) -> Form:
    header = f"{CHANNEL}commentary {FUNCTION_CALL}{function.name} {CONSTRAIN}json{MESSAGE}"
    return Series((Fixed(header), Json(function.schema)))


def _addressed(function: EnforcedFunction) -> Tag:
    """Return the form of a message to a function, from its recipient on."""
    message = Series((Regex(_BEHIND_RECIPIENT), Fixed(MESSAGE), Json(function.schema)))
    return Tag(f"{FUNCTION_CALL}{function.name}", message)
