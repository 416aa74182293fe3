"""`step3`: reasoning of Step 3, whose prompt opens the block.

https://huggingface.co/stepfun-ai/step3, chat template
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class Step3(ThinkingParser):
    """Everything is reasoning until ``</think>``."""

    conformance = "ferrule_plugins.reasoning_parser.samples:DEEPSEEK_R1"
    begins_inside = True
