"""`qwen3`: reasoning of Qwen 3, which may be absent.

With ``enable_thinking`` false the chat template puts an empty block into the prompt: the answer is content from its
beginning. https://huggingface.co/Qwen/Qwen3-8B
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class Qwen3(ThinkingParser):
    """``<think>…</think>`` and the answer; the block is optional."""

    conformance = "ferrule_plugins.reasoning_parser.samples:QWEN3"
