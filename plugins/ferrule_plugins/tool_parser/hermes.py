"""`hermes`: calls of the Hermes 2 Pro and 3, and Qwen 2.5 and 3 models.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Lisbon"}}
    </tool_call>

https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

from ferrule_parsing import TaggedJsonParser


class Hermes(TaggedJsonParser):
    conformance = "ferrule_plugins.tool_parser.samples:HERMES"
    open_tag = "<tool_call>"
    close_tag = "</tool_call>"
