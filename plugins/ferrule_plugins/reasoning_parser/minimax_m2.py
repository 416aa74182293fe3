"""`minimax_m2`: reasoning of MiniMax M2, whose prompt opens the block.

https://huggingface.co/MiniMaxAI/MiniMax-M2, chat template
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class MiniMaxM2(ThinkingParser):
    """Everything is reasoning until ``</think>``."""

    conformance = "ferrule_plugins.reasoning_parser.samples:MINIMAX_M2"
    begins_inside = True
    dropped_tags = ("</think>",)  # that the model writes once more
