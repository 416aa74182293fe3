"""`glm45`: reasoning of GLM 4.5, 4.6 and 4.7.

With `enable_thinking` false the chat template ends the prompt with an empty block; the template of GLM 4.7 opens the
block otherwise. https://huggingface.co/zai-org/GLM-4.5, chat template
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class Glm45(ThinkingParser):
    """``<think>…</think>`` and the answer; the block is optional."""

    conformance = "ferrule_plugins.reasoning_parser.samples:QWEN3"
