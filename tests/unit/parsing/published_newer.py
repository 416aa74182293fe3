"""Outputs as published for the tool parsers of models of 2026 and their kin; see test_published for the sources."""

from __future__ import annotations

from typing import Any

_GLM = "<tool_call>{}\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
_QWEN = "<tool_call>\n<function=forecast>\n<parameter=city>Oslo</parameter>\n</function>\n</tool_call>"
_ONE = '{"name": "forecast", "arguments": {"city": "Oslo"}}'
_INTERN = '{"name": "forecast", "parameters": {"city": "Oslo"}}'
_COHERE = '[\n    {"tool_call_id": "0", "tool_name": "forecast", "parameters": {"city": "Oslo"}}\n]'
_ALONE: list[tuple[str, Any]] = [("forecast", {"city": "Oslo"})]
_DAYS: list[tuple[str, Any]] = [("forecast", {"city": "Oslo", "days": 2})]

NEWER: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("mimo", _QWEN, "", _ALONE),
    ("step3p5", _QWEN, "", _ALONE),
    ("poolside_v1", "So. " + _GLM.format("forecast"), "So.", _ALONE),
    ("interns1", f"<|action_start|> <|plugin|>\n{_INTERN}<|action_end|>", "", _ALONE),
    ("longcat", f"<longcat_tool_call>\n{_ONE}\n</longcat_tool_call>", "", _ALONE),
    ("cohere_command4", f"<|START_ACTION|>{_COHERE}<|END_ACTION|>", "", _ALONE),
    ("cohere_command4", "<|START_TEXT|>Hello<|END_TEXT|>", "Hello", []),
    ("gigachat3", f"So.<|message_sep|>\n\nfunction call<|role_sep|>\n{_ONE}", "So.", _ALONE),
    ("gigachat3", f"<|function_call|>{_ONE}", "", _ALONE),
    (
        "apertus",
        'So. <|tools_prefix|>[{"forecast": {"city": "Oslo"}}, {"ping": {}}]<|tools_suffix|>',
        "So.",
        [*_ALONE, ("ping", {})],
    ),
    ("apertus", '<|tools_prefix|>[{ "forecast" : {"city": "Oslo"} }]<|tools_suffix|>', "", _ALONE),
    ("hy_v3", "<tool_calls><tool_call>ping<tool_sep></tool_call></tool_calls>", "", [("ping", {})]),
    (
        "hy_v3",
        "<tool_calls>\n<tool_call>forecast<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n</tool_calls>",
        "",
        _DAYS,
    ),
    (
        "solar_open2",
        "<|tool_call:start|>forecast\n<|tool_arg:start|>city<|tool_arg:value|>Oslo<|tool_arg:end|>\n"
        "<|tool_arg:start|>days<|tool_arg:value|>2<|tool_arg:end|>\n<|tool_call:end|>",
        "",
        _DAYS,
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="forecast">\n<｜DSML｜parameter name="city" string="true">Oslo'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
        "",
        _DAYS,
    ),
    (
        "kimi_k3",
        "<|open|>response<|sep|>So.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="forecast" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Oslo'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        "So.",
        _DAYS,
    ),
    (
        "minicpm5",
        'So. <function name="forecast"><param name="city"><![CDATA[Oslo]]></param>'
        '<param name="days">2</param></function>',
        "So.",
        _DAYS,
    ),
    (
        "inkling",
        "<|content_text|>So.<|end_message|><|message_model|>forecast<|content_invoke_tool_json|>"
        '{"name":"forecast","args":{"city":"Oslo"}}<|end_message|><|content_model_end_sampling|>',
        "So.",
        _ALONE,
    ),
    (
        "minimax_m3",
        'So.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="forecast">]<]minimax[>[<city>Oslo]<]minimax[>[</city>'
        "]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        "So.",
        _DAYS,
    ),
    (
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="save">]<]minimax[>[<text>\na < b\n]<]minimax[>[</text>'
        "]<]minimax[>[<force>true]<]minimax[>[</force>]<]minimax[>[<tags>]<]minimax[>[<item>x]<]minimax[>[</item>"
        "]<]minimax[>[<item>]<]minimax[>[<k>v]<]minimax[>[</k>]<]minimax[>[</item>]<]minimax[>[</tags>"
        "]<]minimax[>[<meta>]<]minimax[>[<kind>t]<]minimax[>[</kind>]<]minimax[>[</meta>]<]minimax[>[</invoke>\n"
        ']<]minimax[>[<invoke name="ping">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
        "",
        [
            ("save", {"text": "\na < b\n", "force": True, "tags": ["x", {"k": "v"}], "meta": {"kind": "t"}}),
            ("ping", {}),
        ],
    ),
]
