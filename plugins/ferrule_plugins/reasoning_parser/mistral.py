"""`mistral`: reasoning of Magistral, between special tokens.

https://huggingface.co/mistralai/Magistral-Small-2509, SYSTEM_PROMPT.txt and chat template
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class Mistral(ThinkingParser):
    """``[THINK]…[/THINK]`` and the answer; the block is optional."""

    conformance = "ferrule_plugins.reasoning_parser.samples:MISTRAL"
    open_tag = "[THINK]"
    close_tag = "[/THINK]"
