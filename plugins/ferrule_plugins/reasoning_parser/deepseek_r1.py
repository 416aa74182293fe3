"""`deepseek_r1`: reasoning of DeepSeek R1, its distilled models and QwQ, whose prompt opens the reasoning block.

https://huggingface.co/deepseek-ai/DeepSeek-R1
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class DeepSeekR1(ThinkingParser):
    """Everything is reasoning until ``</think>``, whether or not the output begins with ``<think>``."""

    conformance = "ferrule_plugins.reasoning_parser.samples:DEEPSEEK_R1"
    begins_inside = True
