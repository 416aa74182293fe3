"""Outputs of models in each parser's format, for `ferrule plugins check` and tests. Not for servers."""

from __future__ import annotations

from ferrule_testkit.kits import CallText

_WEATHER = CallText(
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lis</tool_call>bon", "unit": "\\"C\\\\"}}\n'
    "</tool_call>",
    "get_weather",
    {"city": "Lis</tool_call>bon", "unit": '"C\\'},
)
_ADD = CallText(
    '<tool_call>{"arguments": {"a": 1, "b": {"x": [1, "}"]}}, "id": [{}], "name": "add"}</tool_call>',
    "add",
    {"a": 1, "b": {"x": [1, "}"]}},
)
_NOW = CallText('<tool_call> {"name":"now"} </tool_call>', "now", {})

HERMES = {
    "samples": (
        ["Hello. ", _WEATHER, "\n", _ADD, " between ", _NOW, " after"],
        [_WEATHER],
        [_NOW, _ADD],
        ["No <tool_call> here, <tool_call>{ nor here"],
    )
}

_HEADER = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
OPENAI = {
    "samples": (
        ["Let me see. ", CallText(_HEADER.format("now") + '{"zone": "CET"}<|call|>', "now", {"zone": "CET"}), " Done."],
        [
            CallText(_HEADER.format("add") + '{"a": 1, "b": "{\\"<b>"}<|call|>', "add", {"a": 1, "b": '{"<b>'}),
            CallText(
                '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": []}<|call|>',
                "f",
                {"x": []},
            ),
        ],
        ["No <|call|> here, <|x|> nor here."],
    )
}
