"""`kimi_k2`: reasoning of Kimi K2 Thinking.

The model may begin its calls without closing the block.
https://huggingface.co/moonshotai/Kimi-K2-Thinking, chat template and docs/tool_call_guidance.md
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class KimiK2(ThinkingParser):
    """``<think>…</think>`` and the answer; the block is optional, and calls end it too."""

    conformance = "ferrule_plugins.reasoning_parser.samples:KIMI_K2"
    ending_tags = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>")
