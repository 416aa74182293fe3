"""`olmo3`: reasoning of OLMo 3 Think, whose prompt opens the block. The tags are ordinary text.

https://huggingface.co/allenai/Olmo-3-7B-Think, chat template
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class Olmo3(ThinkingParser):
    """Everything is reasoning until ``</think>``, whether or not the output begins with ``<think>``."""

    conformance = "ferrule_plugins.reasoning_parser.samples:DEEPSEEK_R1"
    begins_inside = True
