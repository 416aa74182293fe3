"""`hunyuan_a13b`: reasoning of Hunyuan A13B, with tags around the answer too.

Without thinking (`enable_thinking` false, or ``/no_think`` in the message) the block is empty.
https://huggingface.co/tencent/Hunyuan-A13B-Instruct, model card and chat template
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class HunyuanA13B(ThinkingParser):
    """``<think>…</think>`` and ``<answer>…</answer>``; block and tags are optional."""

    conformance = "ferrule_plugins.reasoning_parser.samples:HUNYUAN_A13B"
    answer_tags = ("<answer>", "</answer>")
