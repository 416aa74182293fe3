"""`hermes`: calls of the Hermes 2 Pro and 3, and Qwen 2.5 and 3 models. Others write them in the same way.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Lisbon"}}
    </tool_call>

https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

from ferrule_parsing import TaggedJsonParser


class Hermes(TaggedJsonParser):
    conformance = "ferrule_testkit.samples.tool_parser:HERMES"
    open_tag = "<tool_call>"
    close_tag = "</tool_call>"


class Granite4(Hermes):
    """`granite4`: Granite 4, whose chat template writes calls as Hermes does.
    https://huggingface.co/ibm-granite/granite-4.0-h-small
    """

    special_tokens = ("<tool_call>", "</tool_call>")


class Ernie45(Hermes):
    """`ernie45`: ERNIE 4.5 with thinking, whose chat template writes calls as Hermes does.
    https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-Thinking
    """

    special_tokens = ("<tool_call>", "</tool_call>")


class LongCat(TaggedJsonParser):
    """`longcat`: LongCat Flash, which writes calls as Hermes does, between tags of its own.

        <longcat_tool_call>
        {"name": "get_weather", "arguments": {"city": "Lisbon"}}
        </longcat_tool_call>

    https://huggingface.co/meituan-longcat/LongCat-Flash-Chat
    """

    conformance = "ferrule_testkit.samples.tool_parser:LONGCAT"
    special_tokens = ("<longcat_tool_call>", "</longcat_tool_call>")
    open_tag = "<longcat_tool_call>"
    close_tag = "</longcat_tool_call>"
