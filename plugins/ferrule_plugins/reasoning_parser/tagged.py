"""Reasoning between tags, which calls end too. Each class says whose, and which tags these are."""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class HyV3(ThinkingParser):
    """`hy_v3`: Hunyuan 3, ``<think>…</think>`` and the answer; the block is optional.
    https://github.com/vllm-project/vllm, the parser `hy_v3`
    """

    conformance = "ferrule_plugins.reasoning_parser.samples:HY_V3"
    ending_tags = ("<tool_calls>",)


class PoolsideV1(ThinkingParser):
    """`poolside_v1`: Laguna, ``<think>…</think>`` and the answer; the block is optional, and the prompt may open it.
    https://github.com/vllm-project/vllm, the parser `poolside_v1`
    """

    conformance = "ferrule_plugins.reasoning_parser.samples:POOLSIDE_V1"
    ending_tags = ("<tool_call>",)


class MiniMaxM3(ThinkingParser):
    """`minimax_m3`: MiniMax M3, ``<mm:think>…</mm:think>`` and the answer; the block is optional.

    With `thinking_mode` "enabled" the prompt opens it. https://github.com/vllm-project/vllm, the parser `minimax_m3`
    """

    conformance = "ferrule_plugins.reasoning_parser.samples:MINIMAX_M3"
    open_tag = "<mm:think>"
    close_tag = "</mm:think>"
    ending_tags = ("]<]minimax[>[<tool_call>",)


class SolarOpen2(ThinkingParser):
    """`solar_open2`: Solar Open 2, whose prompt opens the block, or closes it for a small `reasoning_effort`.
    https://github.com/vllm-project/vllm, the parser `solar_open2`
    """

    conformance = "ferrule_plugins.reasoning_parser.samples:SOLAR_OPEN2"
    open_tag = "<|think:start|>"
    close_tag = "<|think:end|>"
    ending_tags = ("<|tool_call:start|>",)
    begins_inside = True
