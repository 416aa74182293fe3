"""A reasoning parser written for vLLM, behind Ferrule's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ferrule.interfaces.parsers import ChoiceContext, Content, Reasoning, ReasoningParser, TextDelta
from ferrule.interfaces.plugins import log_fault
from ferrule_plugins.compat_vllm.wrapped import has_parameter, method_of, request_of, tokenizer_of

_Events = list[Reasoning | Content]


class VllmReasoningParser(ReasoningParser):
    """A reasoning parser of vLLM as one of Ferrule. `wrapped` is the file's class, `title` its name in logs.

    A streamed answer goes through `extract_reasoning_streaming`, another through `extract_reasoning`; both also under
    their older names with `_content`. A class that has only one of them is used that way for both. A prompt that ends
    the reasoning (`is_reasoning_end`) makes all of the answer content. What the class raises is logged, and the answer
    is content from there on.
    """

    wrapped: ClassVar[type]
    title: ClassVar[str]

    def __init__(self) -> None:
        self._begun = False
        self._text = ""
        self._ids: list[int] = []

    def begin(self, context: ChoiceContext) -> None:
        self._begun = True
        self._parser: Any = self.wrapped(tokenizer_of(context), **_options(self.wrapped, context))
        if (told := getattr(self._parser, "set_prompt_token_ids", None)) is not None:
            told(list(context.prompt_ids))
        request = request_of(context)
        adjust = getattr(self._parser, "adjust_request", None)
        self._request = (adjust(request) if adjust is not None else None) or request
        self.wants_special_tokens = not self._request.skip_special_tokens
        self._whole = method_of(self._parser, "extract_reasoning", "extract_reasoning_content")
        self._by_delta = method_of(self._parser, "extract_reasoning_streaming", "extract_reasoning_content_streaming")
        if self._whole is not None and not context.streamed:
            self._by_delta = None
        ends = method_of(self._parser, "is_reasoning_end")
        self._over = ends is not None and bool(ends(list(context.prompt_ids)))

    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        if not self._begun:
            self.begin(ChoiceContext())
        if self._over:
            return [Content(delta.text)]
        text, ids = self._text, self._ids
        self._text, self._ids = text + delta.text, [*ids, *delta.token_ids]
        if self._by_delta is None:
            return []
        try:
            message = self._by_delta(text, self._text, delta.text, ids, self._ids, list(delta.token_ids))
        except Exception:
            return [*self._give_up(), Content(delta.text)]
        if message is None:
            return []
        return _events(message.reasoning or message.reasoning_content, message.content)

    def finish(self) -> Sequence[Reasoning | Content]:
        if not self._begun or self._over or self._by_delta is not None:
            return []
        try:
            return _events(*self._whole(self._text, self._request))
        except Exception:
            return [*self._give_up(), Content(self._text)]

    def _give_up(self) -> _Events:
        log_fault(self.title, "an answer", "the rest of it is content")
        self._over = True
        return []


def _events(reasoning: str | None, content: str | None) -> _Events:
    events: _Events = [Reasoning(reasoning)] if reasoning else []
    return [*events, Content(content)] if content else events


def _options(found: type, context: ChoiceContext) -> dict[str, Any]:
    """Return the template's arguments, for a class whose constructor takes them."""
    name = "chat_template_kwargs"
    return {name: dict(context.template_kwargs)} if has_parameter(found, name) else {}


def wrap_reasoning_parser(found: type, title: str) -> type[VllmReasoningParser]:
    """Make a parser class of Ferrule around one of vLLM."""
    return type(found.__name__, (VllmReasoningParser,), {"wrapped": found, "title": title, "__doc__": found.__doc__})
