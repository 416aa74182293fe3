"""`openai_gptoss`: reasoning of gpt-oss, in the channel "analysis" of OpenAI's Harmony format.

https://cookbook.openai.com/articles/openai-harmony, chat template of https://huggingface.co/openai/gpt-oss-20b
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.forms import Fixed, Form, OneOf, Series, Until
from ferrule.interfaces.parsers import ChoiceContext, Content, Reasoning, ReasoningParser, TextDelta, ThoughtTags
from ferrule_parsing.harmony import (
    CHANNEL,
    END,
    MESSAGE,
    SPECIAL_TOKENS,
    START,
    Body,
    HarmonyReader,
    Head,
    Part,
    starts_message,
)

_ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_FINAL = f"{CHANNEL}final{MESSAGE}"
_NEXT = f"{START}assistant"


class OpenAIGptOss(ReasoningParser):
    """Messages of the channel "analysis" are reasoning, all others content.

    Calls, which are messages to a recipient, stay as they were written where the request has tools that may be called,
    for the tool parser `openai`. Elsewhere their text is content.
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:OPENAI_GPTOSS"
    special_tokens = SPECIAL_TOKENS

    def __init__(self) -> None:
        self._reader = HarmonyReader()
        self._head = Head()
        self._calls = False
        self._inside = self._over = False  # how the prompt ends: in the thoughts, or in the answer

    def begin(self, context: ChoiceContext) -> None:
        self._calls = bool(context.tools) and context.tool_choice != "none"
        prompt = context.prompt.rstrip()
        self._inside = prompt.endswith(_ANALYSIS)
        self._over = prompt.endswith(_FINAL) or (bool(context.continued.strip()) and not self._inside)
        if self._inside or self._over:
            for part in self._reader.feed(_ANALYSIS if self._inside else _FINAL):
                self._read(part)

    def constrain(self, form: Form) -> Form:
        """Return the form as the text of the final message, or as calls, behind a message of thoughts."""
        if self._over:
            return form
        answer = _answer(form)
        behind = Series((Until(END), Fixed(_NEXT), answer))
        if self._inside:
            return behind
        return OneOf((Series((Fixed(_ANALYSIS), behind)), answer))

    def thoughts(self) -> ThoughtTags:
        """Return the tags of thoughts: all messages of the channel count together. Behind them comes the answer; where
        there are tools, the model chooses whether it is a call.
        """
        return ThoughtTags(
            inside=self._inside,
            opens=() if self._over else (_ANALYSIS,),
            closes=(END,),
            end=f"{END}{_NEXT}" if self._calls else f"{END}{_NEXT}{_FINAL}",
            again=not self._over,
        )

    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        return self._events(self._reader.feed(delta.text))

    def finish(self) -> Sequence[Reasoning | Content]:
        return self._events(self._reader.finish())

    def _events(self, parts: Sequence[Part]) -> list[Reasoning | Content]:
        return [event for part in parts if (event := self._read(part)) is not None]

    def _read(self, part: Part) -> Reasoning | Content | None:
        if isinstance(part, Head):
            self._head = part
        verbatim = self._calls and self._head.recipient is not None
        if isinstance(part, Body):
            thought = self._head.channel == "analysis" and not verbatim
            return Reasoning(part.text) if thought else Content(part.text)
        return Content(part.raw) if verbatim and part.raw else None


def _answer(form: Form) -> Form:
    """Return the form with the header of the final message, where it is not messages itself."""
    if isinstance(form, OneOf):
        return OneOf(tuple(_answer(option) for option in form.options))
    return form if starts_message(form) else Series((Fixed(_FINAL), form))
