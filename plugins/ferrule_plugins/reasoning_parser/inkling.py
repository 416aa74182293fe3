"""`inkling`: reasoning of Inkling, whose messages each name their kind.

    <|message_model|><|content_thinking|>A sum.<|end_message|><|message_model|><|content_text|>Five.<|end_message|>

The prompt ends with the first tag.
https://github.com/vllm-project/vllm and https://github.com/sgl-project/sglang, their parsers `inkling`
"""

from __future__ import annotations

from ferrule.forms import Fixed, Form, OneOf, Series
from ferrule_parsing import Tags, ThinkingParser

_MESSAGE, _TEXT, _END = "<|message_model|>", "<|content_text|>", "<|end_message|>"


class Inkling(ThinkingParser):
    """Messages of thoughts, which are optional and may come between others, and the answer without its tags."""

    conformance = "ferrule_testkit.samples.reasoning_parser:INKLING"
    special_tokens = (_MESSAGE, _TEXT, _END, "<|content_thinking|>", "<|content_model_end_sampling|>")
    open_tag = "<|content_thinking|>"
    close_tag = _END
    dropped_tags = (_MESSAGE, _TEXT, _END, "<|content_model_end_sampling|>")
    _thoughts = Tags("<|content_thinking|>")

    def constrain(self, form: Form) -> Form:
        """Return the form as it is, as calls have it, or in a message of its own."""
        tags = (Fixed(_MESSAGE + _TEXT), Fixed(_TEXT))
        return super().constrain(OneOf((form, Series((OneOf(tags), form, Fixed(_END))))))

    def _after(self) -> bool:
        """Read behind the thoughts: everything is content but thoughts that come later."""
        text, tag = self._reader.until(self._thoughts)
        self._say(text)
        if tag:
            self._open()
        return bool(tag)
