"""`cohere_command3` and `cohere_command4`: reasoning of Cohere's Command A Reasoning, and of Command A Plus.

    <|START_THINKING|>A sum.<|END_THINKING|><|START_RESPONSE|>Five.<|END_RESPONSE|>

The later models have other marks of the answer. Calls stand beside it, and end the thoughts too.
https://huggingface.co/CohereLabs/command-a-reasoning-08-2025, chat template;
https://github.com/sgl-project/sglang, the parser `cohere_command4`
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class CohereCommand3(ThinkingParser):
    """``<|START_THINKING|>…<|END_THINKING|>`` and the answer; the block is optional."""

    conformance = "ferrule_plugins.reasoning_parser.samples:COHERE_COMMAND3"
    open_tag = "<|START_THINKING|>"
    close_tag = "<|END_THINKING|>"
    ending_tags = ("<|START_ACTION|>",)
    answer_tags = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


class CohereCommand4(CohereCommand3):
    conformance = "ferrule_plugins.reasoning_parser.samples:COHERE_COMMAND4"
    answer_tags = ("<|START_TEXT|>", "<|END_TEXT|>")
