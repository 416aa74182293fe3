"""`minimax_m2_append_think`: the thoughts of MiniMax M2 stay in the content, between their tags.

MiniMax asks clients to send the thoughts back in the history, and those that only know `content` then do. The opening
tag, which is the end of the prompt, is part of the content.
https://huggingface.co/MiniMaxAI/MiniMax-M2, section on interleaved thinking
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.interfaces.parsers import ChoiceContext, Content, Reasoning, TextDelta
from ferrule_parsing import ThinkingParser


class MiniMaxM2AppendThink(ThinkingParser):
    """Everything is content, with the opening tag that the prompt ends with in front of it."""

    conformance = "ferrule_testkit.samples.reasoning_parser:MINIMAX_M2_APPEND_THINK"
    begins_inside = True

    def __init__(self) -> None:
        super().__init__()
        self._before_text = ""

    def begin(self, context: ChoiceContext) -> None:
        super().begin(context)
        body = context.prompt.rstrip()
        if body.endswith(self._open_tags):
            self._before_text = self._open_tags[0] + context.prompt[len(body) :]

    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        text, self._before_text = self._before_text + delta.text, ""
        return [Content(text)] if text else []

    def finish(self) -> Sequence[Reasoning | Content]:
        return []
