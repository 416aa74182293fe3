"""Outputs of models in each parser's format, for `ferrule plugins check` and tests. Not for servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ferrule_testkit.kits import CallText

Arguments = Mapping[str, Any]
Written = Callable[[str, Arguments], str]

_ODD: Arguments = {"city": 'Lis</tool_call>bon\n"2" {x', "unit": "\\C\t[é]"}
_TAME: Arguments = {"city": "São Tomé, 2 [x] {y}", "unit": 'a "quoted" \\ word'}
_NESTED: Arguments = {"a": 1, "b": {"x": [1, "}", None, True]}}
_FLAT: Arguments = {"a": -1, "b": 2.5e3}

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


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(written: Written, name: str, arguments: Arguments, before: str = "", behind: str = "") -> CallText:
    return CallText(before + written(name, arguments) + behind, name, arguments)


def _each(written: Written, weather: Arguments, add: Arguments, *texts: str, **more: Any) -> dict[str, Any]:
    """Return samples of calls that each have a block of their own. `texts`: texts that look like a call and are not."""
    one, two = _call(written, "get_weather", weather), _call(written, "add", add)
    now = _call(written, "now", {})
    samples = [[one], ["Hello. ", now, "\n", two, " after"], *([text] for text in texts)]
    return {"samples": samples, **more}


def _block(
    written: Written, weather: Arguments, add: Arguments, open: str, separator: str, close: str, **more: Any
) -> dict[str, Any]:
    """Return samples of calls of which several stand in one block."""
    several = [
        _call(written, "get_weather", weather, before=open),
        _call(written, "now", {}, before=separator),
        _call(written, "add", add, before=separator, behind=close),
    ]
    alone = _call(written, "now", {}, before=open, behind=close)
    samples: list[list[str | CallText]] = [[*several], [alone]]
    told = more.pop("told", f"No {open} here")
    if more.pop("marked", True):
        samples += [["Hello. ", alone, " after"], [told]]
    return {"samples": samples, **more}


def _object(name: str = "name", arguments: str = "arguments") -> Written:
    return lambda function, values: _json({name: function, arguments: values})


GRANITE = _block(_object(), _ODD, _NESTED, "<|tool_call|>[", ", ", "]")
GRANITE_20B_FC = _each(lambda *call: f"<function_call> {_object()(*call)}", _ODD, _NESTED, "No <function_call> here")
INTERNLM = _each(
    lambda *call: f"<|action_start|><|plugin|>\n{_object('name', 'parameters')(*call)}<|action_end|>", _ODD, _NESTED
)
JAMBA = _block(_object(), _ODD, _NESTED, "<tool_calls>[\n    ", ",\n    ", "\n]</tool_calls>")
HUNYUAN_A13B = _block(_object(), _ODD, _NESTED, "<tool_calls>[", ", ", "]</tool_calls>")
PHI4_MINI = _block(_object(), _ODD, _NESTED, "functools[", ", ", "]")
XLAM = _block(_object(), _ODD, _NESTED, "[", ", ", "]", marked=False)
LLAMA3_JSON = _block(_object("name", "parameters"), _ODD, _NESTED, "", "; ", "", marked=False)
COHERE_COMMAND3 = _block(
    lambda name, values: _json({"tool_call_id": "0", "tool_name": name, "parameters": values}),
    *(_ODD, _NESTED, "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
)
GIGACHAT3 = _each(lambda *call: f"<|function_call|>{_object()(*call)}", _ODD, _NESTED)
LONGCAT = _each(lambda *call: f"<longcat_tool_call>\n{_object()(*call)}\n</longcat_tool_call>", _ODD, _NESTED)
APERTUS = _block(
    lambda name, values: _json({name: values}),
    *(_ODD, _NESTED, "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    json_names=False,
)
MISTRAL = _block(_object(), _ODD, _NESTED, "[TOOL_CALLS][", ", ", "]")
MISTRAL["samples"] += _each(lambda name, values: f"[TOOL_CALLS]{name}[ARGS]{_json(values)}", _ODD, _NESTED)["samples"]
KIMI_K2 = _block(
    lambda name, values: (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{_json(values)}<|tool_call_end|>"
    ),
    *(_ODD, _NESTED, "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    new_ids=False,
)
DEEPSEEK_V3 = _block(
    lambda name, values: (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(values)}\n```<｜tool▁call▁end｜>"
    ),
    *(_ODD, _NESTED, "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK_V31 = _block(
    lambda name, values: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(values)}<｜tool▁call▁end｜>",
    *(_ODD, _NESTED, "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
)


def _tags(call: str, argument: str, end: str) -> Written:
    """Return a function that writes calls. `call` and `argument` are patterns with {name}, {key} and {value}."""

    def written(name: str, values: Arguments) -> str:
        texts = {key: value if isinstance(value, str) else _json(value) for key, value in values.items()}
        inside = "".join(
            argument.format(key=key, value=text, string=str(isinstance(values[key], str)).lower())
            for key, text in texts.items()
        )
        return f"{call.format(name=name)}{inside}{end}"

    return written


_QWEN = _tags(
    "<tool_call>\n<function={name}>\n",
    "<parameter={key}>\n{value}\n</parameter>\n",
    "</function>\n</tool_call>",
)
_GLM = _tags("<tool_call>{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n", "</tool_call>")
QWEN3_CODER = _each(_QWEN, _ODD, _FLAT, "No <tool_call> here, nor <function=f here", json_names=False)
GLM45 = _each(_GLM, _ODD, _FLAT, "No <tool_call> (here)", json_names=False)
GLM47 = _each(
    _tags("<tool_call>{name}", "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>", "</tool_call>"),
    *(_ODD, _FLAT),
    json_names=False,
)
MINIMAX_M2 = _block(
    _tags('<invoke name="{name}">\n', '<parameter name="{key}">{value}</parameter>\n', "</invoke>"),
    *(_ODD, _FLAT, "<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"),
    json_names=False,
)
SEED_OSS = _each(
    _tags(
        "<seed:tool_call>\n<function={name}>\n",
        "<parameter={key}>{value}</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    *(_ODD, _FLAT),
    json_names=False,
)
STEP3 = _block(
    _tags(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n',
        '<steptml:parameter name="{key}">{value}</steptml:parameter>\n',
        "</steptml:invoke><｜tool_call_end｜>",
    ),
    *(_ODD, _FLAT, "<｜tool_calls_begin｜>\n", "\n", "\n<｜tool_calls_end｜>"),
    json_names=False,
)
DEEPSEEK_V32 = _block(
    _tags(
        '<｜DSML｜invoke name="{name}">\n',
        '<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>",
    ),
    *(_ODD, _NESTED, "<｜DSML｜function_calls>\n", "\n", "\n</｜DSML｜function_calls>"),
    told="No <DSML> here",  # that is not the tag: such tags never become content
    json_names=False,
)

DEEPSEEK_V4 = {
    **DEEPSEEK_V32,
    "samples": [
        [
            CallText(one.text.replace("function_calls>", "tool_calls>"), one.name, one.arguments)
            if isinstance(one, CallText)
            else one.replace("function_calls>", "tool_calls>")
            for one in sample
        ]
        for sample in DEEPSEEK_V32["samples"]
    ],
}


def _kimi_k3(name: str, values: Arguments) -> str:
    kinds = {str: "string", int: "number", float: "number", dict: "object", list: "array"}
    inside = "".join(
        f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>'
        f"{value if isinstance(value, str) else _json(value)}<|close|>argument<|sep|>"
        for key, value in values.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{inside}<|close|>call<|sep|>'


KIMI_K3 = _block(_kimi_k3, _ODD, _NESTED, "<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>", json_names=False)
HY_V3 = _block(
    _tags(
        "<tool_call>{name}<tool_sep>\n", "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n", "</tool_call>"
    ),
    *(_ODD, _FLAT, "<tool_calls>\n", "\n", "\n</tool_calls>"),
    json_names=False,
)
MINICPM5 = _each(
    _tags('<function name="{name}">', '<param name="{key}">{value}</param>', "</function>"),
    *(_ODD, _FLAT),
    json_names=False,
)
MINICPM5["samples"].append(
    [
        CallText(
            '<function name="now"><paramname="a"><![CDATA[</param></function>\n]>]]></param></function>',
            "now",
            {"a": "</param></function>\n]>"},
        )
    ]
)


def _minimax_m3(name: str, values: Arguments) -> str:
    mark = "]<]minimax[>["

    def value(of: Any) -> str:
        match of:
            case dict():
                return "".join(f"{mark}<{key}>{value(one)}{mark}</{key}>" for key, one in of.items())
            case list():
                return "".join(f"{mark}<item>{value(one)}{mark}</item>" for one in of)
            case str():
                return of
        return _json(of)

    return f'{mark}<invoke name="{name}">{value(values)}{mark}</invoke>'


_M3_OPEN, _M3_CLOSE = "]<]minimax[>[<tool_call>\n", "\n]<]minimax[>[</tool_call>"
MINIMAX_M3 = _block(_minimax_m3, _ODD, _FLAT, _M3_OPEN, "\n", _M3_CLOSE, json_names=False)
MINIMAX_M3["samples"].append(
    [
        _call(
            *(_minimax_m3, "add", {"a": 1, "b": {"x": ["1", "}", {"y": ["]<]", ""]}], "z": "0"}}),
            *(_M3_OPEN, _M3_CLOSE),
        )
    ]
)
INKLING = _each(
    lambda name, values: (
        f"<|message_model|>{name}<|content_invoke_tool_json|>"
        f'{{"name":{_json(name)},"args":{_json(values)}}}<|end_message|>'
    ),
    *(_ODD, _NESTED),
)
SOLAR_OPEN2 = _each(
    _tags(
        "<|tool_call:start|>{name}\n",
        "<|tool_arg:start|>{key}<|tool_arg:value|>{value}<|tool_arg:end|>\n",
        "<|tool_call:end|>",
    ),
    *(_ODD, _FLAT),
    json_names=False,
)


def _python(name: str, values: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def _gemma(open: str, quote: str, close: str) -> Written:
    def value(of: Any) -> str:
        match of:
            case str():
                return f"{quote}{of}{quote}"
            case dict():
                return "{" + members(of) + "}"
            case list():
                return "[" + ",".join(map(value, of)) + "]"
        return _json(of)

    def members(values: Arguments) -> str:
        return ",".join(f"{key}:{value(of)}" for key, of in values.items())

    return lambda name, values: f"{open}call:{name}{{{members(values)}}}{close}"


PYTHONIC = _block(_python, _ODD, _NESTED, "[", ", ", "]", marked=False, json_names=False)
LLAMA4_PYTHONIC = _block(_python, _ODD, _NESTED, "<|python_start|>[", ", ", "]<|python_end|>", json_names=False)
OLMO3 = _block(_python, _ODD, _NESTED, "<function_calls>\n", "\n", "\n</function_calls>", json_names=False)
LFM2 = _block(_python, _ODD, _NESTED, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", json_names=False)
FUNCTIONGEMMA = _each(
    _gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    _TAME,
    _NESTED,
    json_names=False,
    json_arguments=False,
)
GEMMA4 = _each(_gemma("<|tool_call>", '<|"|>', "<tool_call|>"), _TAME, _NESTED, json_names=False, json_arguments=False)
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
