"""`ernie45`: reasoning of ERNIE 4.5 Thinking, whose prompt opens the block.

https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-Thinking, model card and chat template
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class Ernie45(ThinkingParser):
    """Everything is reasoning until ``</think>``; ``<response>…</response>`` around the answer is optional."""

    conformance = "ferrule_plugins.reasoning_parser.samples:ERNIE45"
    begins_inside = True
    answer_tags = ("<response>", "</response>")
