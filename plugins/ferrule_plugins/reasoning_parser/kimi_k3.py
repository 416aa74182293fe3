"""`kimi_k3`: reasoning of Kimi K3, whose messages are elements of channels.

    <|open|>think<|sep|>A sum.<|close|>think<|sep|><|open|>response<|sep|>Five.<|close|>response<|sep|>
    <|close|>message<|sep|>

https://github.com/sgl-project/sglang and https://github.com/vllm-project/vllm, their parsers `kimi_k3`
"""

from __future__ import annotations

from ferrule_parsing import Tags, ThinkingParser

_MESSAGE_END = Tags("<|close|>message<|sep|>")


class KimiK3(ThinkingParser):
    """The channel of thoughts and the answer; the block is optional, and calls end it too."""

    conformance = "ferrule_testkit.samples.reasoning_parser:KIMI_K3"
    special_tokens = ("<|open|>", "<|close|>", "<|sep|>")
    open_tag = "<|open|>think<|sep|>"
    close_tag = "<|close|>think<|sep|>"
    ending_tags = ("<|open|>tools<|sep|>",)
    answer_tags = ("<|open|>response<|sep|>", "<|close|>response<|sep|>")

    def _after(self) -> bool:
        """Read behind the thoughts: everything is content but the end of the message."""
        text, tag = self._reader.until(_MESSAGE_END)
        self._say(text)
        return bool(tag)
