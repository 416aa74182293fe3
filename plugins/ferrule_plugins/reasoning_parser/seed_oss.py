"""`seed_oss`: reasoning of Seed OSS.

What the model writes about its budget, between ``<seed:cot_budget_reflect>`` and ``</seed:cot_budget_reflect>``, is
part of the reasoning. With a `thinking_budget` of 0 the template ends the prompt with a closed block.
https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct, model card and chat template
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class SeedOss(ThinkingParser):
    """``<seed:think>…</seed:think>`` and the answer; the block is optional."""

    conformance = "ferrule_plugins.reasoning_parser.samples:SEED_OSS"
    open_tag = "<seed:think>"
    close_tag = "</seed:think>"
