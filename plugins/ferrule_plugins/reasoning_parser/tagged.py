"""Reasoning between tags: one class for each way in which models write them.

Each says for whose models, and which tags these are; models of the same form have a class each, because their sources
differ.
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class Qwen3(ThinkingParser):
    """`qwen3`: Qwen 3, ``<think>…</think>`` and the answer; the block is optional.

    With ``enable_thinking`` false the chat template puts an empty block into the prompt: the answer is content from its
    beginning. https://huggingface.co/Qwen/Qwen3-8B
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:QWEN3"


class Glm45(ThinkingParser):
    """`glm45`: GLM 4.5, 4.6 and 4.7, ``<think>…</think>`` and the answer; the block is optional.

    With `enable_thinking` false the chat template ends the prompt with an empty block; the template of GLM 4.7 opens
    the block otherwise. https://huggingface.co/zai-org/GLM-4.5, chat template
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:QWEN3"


class DeepSeekR1(ThinkingParser):
    """`deepseek_r1`: DeepSeek R1, its distilled models and QwQ, whose prompt opens the block.

    Everything is reasoning until ``</think>``, whether or not the output begins with ``<think>``.
    https://huggingface.co/deepseek-ai/DeepSeek-R1
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:DEEPSEEK_R1"
    begins_inside = True


class Olmo3(ThinkingParser):
    """`olmo3`: OLMo 3 Think, whose prompt opens the block. The tags are ordinary text.

    Everything is reasoning until ``</think>``, whether or not the output begins with ``<think>``.
    https://huggingface.co/allenai/Olmo-3-7B-Think, chat template
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:DEEPSEEK_R1"
    begins_inside = True


class Step3(ThinkingParser):
    """`step3`: Step 3, whose prompt opens the block. Everything is reasoning until ``</think>``.
    https://huggingface.co/stepfun-ai/step3, chat template
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:DEEPSEEK_R1"
    begins_inside = True


class MiniMaxM2(ThinkingParser):
    """`minimax_m2`: MiniMax M2, whose prompt opens the block. Everything is reasoning until ``</think>``.
    https://huggingface.co/MiniMaxAI/MiniMax-M2, chat template
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:MINIMAX_M2"
    begins_inside = True
    dropped_tags = ("</think>",)  # that the model writes once more


class Ernie45(ThinkingParser):
    """`ernie45`: ERNIE 4.5 Thinking, whose prompt opens the block.

    Everything is reasoning until ``</think>``; ``<response>…</response>`` around the answer is optional.
    https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-Thinking, model card and chat template
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:ERNIE45"
    begins_inside = True
    answer_tags = ("<response>", "</response>")


class HunyuanA13B(ThinkingParser):
    """`hunyuan_a13b`: Hunyuan A13B, ``<think>…</think>`` and ``<answer>…</answer>``; block and tags are optional.

    Without thinking (`enable_thinking` false, or ``/no_think`` in the message) the block is empty.
    https://huggingface.co/tencent/Hunyuan-A13B-Instruct, model card and chat template
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:HUNYUAN_A13B"
    answer_tags = ("<answer>", "</answer>")


class KimiK2(ThinkingParser):
    """`kimi_k2`: Kimi K2 Thinking, ``<think>…</think>`` and the answer; the block is optional.

    The model may begin its calls without closing the block.
    https://huggingface.co/moonshotai/Kimi-K2-Thinking, chat template and docs/tool_call_guidance.md
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:KIMI_K2"
    ending_tags = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>")


class SeedOss(ThinkingParser):
    """`seed_oss`: Seed OSS, ``<seed:think>…</seed:think>`` and the answer; the block is optional.

    Text that the model writes about its budget, between ``<seed:cot_budget_reflect>`` and
    ``</seed:cot_budget_reflect>``, is part of the reasoning. With a `thinking_budget` of 0 the template ends the prompt
    with a closed block. https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct, model card and chat template
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:SEED_OSS"
    open_tag = "<seed:think>"
    close_tag = "</seed:think>"


class Mistral(ThinkingParser):
    """`mistral`: Magistral, ``[THINK]…[/THINK]`` and the answer; the block is optional. The tags are special tokens.
    https://huggingface.co/mistralai/Magistral-Small-2509, SYSTEM_PROMPT.txt and chat template
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:MISTRAL"
    open_tag = "[THINK]"
    close_tag = "[/THINK]"


class Gemma4(ThinkingParser):
    r"""`gemma4`: Gemma 4, ``<|channel>thought\n…<channel|>`` and the answer; the channel is optional.

    `enable_thinking` puts ``<|think|>`` into the system turn. Without it the template of some sizes ends the prompt
    with an empty channel. https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4, chat template of
    google/gemma-4-E2B-it
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:GEMMA4"
    open_tag = "<|channel>thought"
    close_tag = "<channel|>"


class Granite(ThinkingParser):
    """`granite`: Granite 3.2, whose thoughts sentences open and close; the block is optional.

    With `thinking` the chat template asks the model to write its thoughts after "Here is my thought process:" and its
    response after "Here is my response:"; the model also writes "Here's". Without `thinking` it writes its response
    alone. https://huggingface.co/ibm-granite/granite-3.2-8b-instruct, chat template
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:GRANITE"
    open_tag = ("Here is my thought process:", "Here's my thought process:")
    close_tag = ("Here is my response:", "Here's my response:")


class CohereCommand3(ThinkingParser):
    """`cohere_command3`: Command A Reasoning. Calls stand beside the answer, and end the thoughts too.

        <|START_THINKING|>A sum.<|END_THINKING|><|START_RESPONSE|>Five.<|END_RESPONSE|>

    The block is optional. https://huggingface.co/CohereLabs/command-a-reasoning-08-2025, chat template
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:COHERE_COMMAND3"
    open_tag = "<|START_THINKING|>"
    close_tag = "<|END_THINKING|>"
    ending_tags = ("<|START_ACTION|>",)
    answer_tags = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


class CohereCommand4(CohereCommand3):
    """`cohere_command4`: Command A Plus, with other marks of the answer.
    https://github.com/sgl-project/sglang, the parser `cohere_command4`
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:COHERE_COMMAND4"
    answer_tags = ("<|START_TEXT|>", "<|END_TEXT|>")


class HyV3(ThinkingParser):
    """`hy_v3`: Hunyuan 3, ``<think>…</think>`` and the answer; the block is optional.
    https://github.com/vllm-project/vllm, the parser `hy_v3`
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:HY_V3"
    ending_tags = ("<tool_calls>",)


class PoolsideV1(ThinkingParser):
    """`poolside_v1`: Laguna, ``<think>…</think>`` and the answer; the block is optional, and the prompt may open it.
    https://github.com/vllm-project/vllm, the parser `poolside_v1`
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:POOLSIDE_V1"
    ending_tags = ("<tool_call>",)


class MiniMaxM3(ThinkingParser):
    """`minimax_m3`: MiniMax M3, ``<mm:think>…</mm:think>`` and the answer; the block is optional.

    With `thinking_mode` "enabled" the prompt opens it. https://github.com/vllm-project/vllm, the parser `minimax_m3`
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:MINIMAX_M3"
    open_tag = "<mm:think>"
    close_tag = "</mm:think>"
    ending_tags = ("]<]minimax[>[<tool_call>",)


class SolarOpen2(ThinkingParser):
    """`solar_open2`: Solar Open 2, whose prompt opens the block, or closes it for a small `reasoning_effort`.
    https://github.com/vllm-project/vllm, the parser `solar_open2`
    """

    conformance = "ferrule_testkit.samples.reasoning_parser:SOLAR_OPEN2"
    open_tag = "<|think:start|>"
    close_tag = "<|think:end|>"
    ending_tags = ("<|tool_call:start|>",)
    begins_inside = True
