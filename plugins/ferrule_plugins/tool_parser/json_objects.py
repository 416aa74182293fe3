"""Calls as JSON objects with a name and arguments, marked by tags, or by nothing."""

from __future__ import annotations

from dataclasses import replace

from ferrule_parsing import FormatParser, JsonCall, ToolFormat

_LIST = ("[", "]")


class Granite(FormatParser):
    """`granite`: Granite 3, whose chat template writes a list of calls behind one tag; 3.1 has another spelling of it.

        <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Lisbon"}}]

    https://huggingface.co/ibm-granite/granite-3.1-8b-instruct
    """

    conformance = "ferrule_testkit.samples.tool_parser:GRANITE"
    special_tokens = ("<|tool_call|>", "<tool_call>")
    format = ToolFormat(open=("<|tool_call|>", "<tool_call>"), brackets=_LIST, separator=", ", calls=(JsonCall(),))


class Granite20bFc(FormatParser):
    """`granite-20b-fc`: Granite 20B for function calling, with a tag in front of each call.

        <function_call> {"name": "get_weather", "arguments": {"city": "Lisbon"}}

    https://huggingface.co/ibm-granite/granite-20b-functioncalling
    """

    conformance = "ferrule_testkit.samples.tool_parser:GRANITE_20B_FC"
    special_tokens = ("<function_call>",)
    format = ToolFormat(open=("<function_call>",), padding=(" ", ""), between="", calls=(JsonCall(),))


class InternLM(FormatParser):
    """`internlm`: InternLM 2.5 and 3, which call one function at a time.

        <|action_start|><|plugin|>
        {"name": "get_weather", "parameters": {"city": "Lisbon"}}<|action_end|>

    https://github.com/InternLM/InternLM/blob/main/chat/chat_format.md
    """

    conformance = "ferrule_testkit.samples.tool_parser:INTERNLM"
    special_tokens = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    format = ToolFormat(
        open=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        close=("<|action_end|>",),
        padding=("\n", ""),
        calls=(JsonCall(arguments_keys=("parameters", "arguments")),),
    )


class Jamba(FormatParser):
    """`jamba`: Jamba 1.5, whose chat template writes a list of calls between tags.

        <tool_calls>[
            {"name": "get_weather", "arguments": {"city": "Lisbon"}}
        ]</tool_calls>

    https://huggingface.co/ai21labs/AI21-Jamba-1.5-Mini
    """

    conformance = "ferrule_testkit.samples.tool_parser:JAMBA"
    special_tokens = ("<tool_calls>", "</tool_calls>")
    format = ToolFormat(
        open=("<tool_calls>",),
        close=("</tool_calls>",),
        brackets=("[\n    ", "\n]"),
        separator=",\n    ",
        calls=(JsonCall(),),
    )


class HunyuanA13B(FormatParser):
    """`hunyuan_a13b`: Hunyuan A13B, whose chat template writes a list of calls between tags.

        <tool_calls>[{"name": "get_weather", "arguments": {"city": "Lisbon"}}]</tool_calls>

    https://huggingface.co/tencent/Hunyuan-A13B-Instruct
    """

    conformance = "ferrule_testkit.samples.tool_parser:HUNYUAN_A13B"
    format = ToolFormat(
        open=("<tool_calls>",), close=("</tool_calls>",), brackets=_LIST, separator=", ", calls=(JsonCall(),)
    )


class Phi4Mini(FormatParser):
    """`phi4_mini_json`: Phi-4-mini, which writes a list of calls behind a word if the prompt says so, or between tags.

        functools[{"name": "get_weather", "arguments": {"city": "Lisbon"}}]
        <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Lisbon"}}]<|/tool_call|>

    https://huggingface.co/microsoft/Phi-4-mini-instruct
    """

    conformance = "ferrule_testkit.samples.tool_parser:PHI4_MINI"
    special_tokens = ("<|tool_call|>", "<|/tool_call|>")
    format = ToolFormat(
        open=("functools[", "<|tool_call|>"),  # the word alone stands in other texts
        brackets=_LIST,
        separator=", ",
        calls=(JsonCall(arguments_keys=("arguments", "parameters")),),
        dropped=("<|/tool_call|>",),  # nothing ends the list behind the word
    )


class XLam(FormatParser):
    """`xlam`: the xLAM 1 and 2 models, which write a list of calls, alone or behind the marks of the models that they
    were trained from.

        [{"name": "get_weather", "arguments": {"city": "Lisbon"}}]

    https://huggingface.co/Salesforce/Llama-xLAM-2-8b-fc-r
    """

    conformance = "ferrule_testkit.samples.tool_parser:XLAM"
    special_tokens = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>")
    format = ToolFormat(
        open=("", "[TOOL_CALLS]", "<tool_call>", "```json"),
        close=("</tool_call>", "```"),
        brackets=_LIST,
        separator=", ",
        calls=(JsonCall(),),
    )


class CohereCommand3(FormatParser):
    """`cohere_command3`: Command A, R7B and later, whose chat template writes a list of numbered calls.

        <|START_ACTION|>[
            {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Lisbon"}}
        ]<|END_ACTION|>

    The marks of the answer itself and of its citations are left out. https://huggingface.co/CohereLabs/c4ai-command-a-03-2025
    """

    conformance = "ferrule_testkit.samples.tool_parser:COHERE_COMMAND3"
    special_tokens = ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
    format = ToolFormat(
        open=("<|START_ACTION|>",),
        close=("<|END_ACTION|>",),
        brackets=("[\n    ", "\n]"),
        separator=",\n    ",
        calls=(JsonCall("tool_name", ("parameters",), id_key="tool_call_id"),),
        dropped=("<co>", "</co>", ("<co:", ">"), ("</co:", ">")),
    )


class CohereCommand4(CohereCommand3):
    """`cohere_command4`: Command A Plus and later, with calls as before and other marks of the answer.
    https://github.com/sgl-project/sglang, the parser `cohere_command4`, which quotes the model's chat template
    """

    special_tokens = ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_TEXT|>", "<|END_TEXT|>")
    format = replace(CohereCommand3.format, dropped=("<|START_TEXT|>", "<|END_TEXT|>"))


class GigaChat3(FormatParser):
    """`gigachat3`: GigaChat 3, which calls one function at a time; the first release has another mark of a call.

        <|function_call|>{"name": "get_weather", "arguments": {"city": "Lisbon"}}
        <|message_sep|>

        function call<|role_sep|>
        {"name": "get_weather", "arguments": {"city": "Lisbon"}}

    https://huggingface.co/ai-sage/GigaChat3-10B-A1.8B
    """

    conformance = "ferrule_testkit.samples.tool_parser:GIGACHAT3"
    special_tokens = ("<|function_call|>", "<|role_sep|>", "<|message_sep|>")
    format = ToolFormat(
        open=("<|function_call|>", "function call<|role_sep|>"),
        between="",
        calls=(JsonCall(),),
        dropped=("<|message_sep|>",),
    )


class Llama3Json(FormatParser):
    """`llama3_json` and `llama4_json`: Llama 3.1 and later, whose calls are the answer itself, or stand behind a tag.

        {"name": "get_weather", "parameters": {"city": "Lisbon"}}

    Several calls are separated by semicolons. An object whose name is not an offered function is content.
    https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/
    """

    conformance = "ferrule_testkit.samples.tool_parser:LLAMA3_JSON"
    special_tokens = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
    format = ToolFormat(
        open=("", "<|python_tag|>", "<|python_start|>"),
        close=("<|python_end|>",),
        separator="; ",
        calls=(JsonCall(arguments_keys=("parameters", "arguments")),),
    )
