"""Calls whose arguments are written as a program writes them."""

from __future__ import annotations

import re

from ferrule_parsing import CallHead, FormatParser, JsonCall, LiteralCall, Literals, ToolFormat

_LIST = ("[", "]")
_PYTHON = LiteralCall()


class Pythonic(FormatParser):
    """`pythonic`: Llama 3.2, ToolACE and others, whose calls are the answer itself, as a list in Python.

        [get_weather(city='Lisbon'), add(a=1, b=2)]

    A list that does not begin with an offered function is content.
    https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_2/
    """

    conformance = "ferrule_testkit.samples.tool_parser:PYTHONIC"
    special_tokens = ("<|python_tag|>",)
    format = ToolFormat(open=("", "<|python_tag|>"), brackets=_LIST, separator=", ", calls=(_PYTHON,))


class Llama4Pythonic(FormatParser):
    """`llama4_pythonic`: Llama 4, as `pythonic`, mostly between tags.

        <|python_start|>[get_weather(city="Lisbon")]<|python_end|>

    https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/
    """

    conformance = "ferrule_testkit.samples.tool_parser:LLAMA4_PYTHONIC"
    special_tokens = ("<|python_start|>", "<|python_end|>")
    format = ToolFormat(
        open=("", "<|python_start|>"), close=("<|python_end|>",), brackets=_LIST, separator=", ", calls=(_PYTHON,)
    )


class Olmo3(FormatParser):
    """`olmo3`: OLMo 3, whose chat template writes calls on lines of their own.

        <function_calls>
        get_weather(city="Lisbon")
        </function_calls>

    https://huggingface.co/allenai/Olmo-3-7B-Instruct
    """

    conformance = "ferrule_testkit.samples.tool_parser:OLMO3"
    special_tokens = ("<function_calls>", "</function_calls>")
    format = ToolFormat(
        open=("<function_calls>",), close=("</function_calls>",), separator="\n", padding=("\n", "\n"), calls=(_PYTHON,)
    )


class Lfm2(FormatParser):
    """`lfm2`: LFM2, which writes a list in Python between tags, or JSON when the prompt asks for it. Some outputs
    repeat the list behind the closing tag; this is not a second call.

        <|tool_call_start|>[get_weather(city="Lisbon")]<|tool_call_end|>

    https://huggingface.co/LiquidAI/LFM2-1.2B
    """

    conformance = "ferrule_testkit.samples.tool_parser:LFM2"
    special_tokens = ("<|tool_call_start|>", "<|tool_call_end|>")
    format = ToolFormat(
        open=("<|tool_call_start|>",),
        close=("<|tool_call_end|>",),
        brackets=_LIST,
        separator=", ",
        calls=(_PYTHON, JsonCall()),
        echoed=True,
    )


_GEMMA_WORD = re.compile(r"""[^\s,()\[\]{}:<"|]+""")


class FunctionGemma(FormatParser):
    """`functiongemma`: FunctionGemma, whose strings stand between marks of their own.

        <start_function_call>call:get_weather{city:<escape>Lisbon<escape>}<end_function_call>

    https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
    """

    conformance = "ferrule_testkit.samples.tool_parser:FUNCTIONGEMMA"
    special_tokens = ("<start_function_call>", "<end_function_call>", "<escape>")
    format = ToolFormat(
        open=("<start_function_call>",),
        close=("<end_function_call>",),
        between="",
        calls=(
            LiteralCall(
                CallHead("call:", ("{",)),
                Literals(quotes=("<escape>",), escapes=False, assign=":", end="}", separator=",", bare=_GEMMA_WORD),
            ),
        ),
    )


class Gemma4(FormatParser):
    """`gemma4`: Gemma 4, as FunctionGemma with other marks.

        <|tool_call>call:get_weather{city:<|"|>Lisbon<|"|>}<tool_call|>

    https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4
    """

    conformance = "ferrule_testkit.samples.tool_parser:GEMMA4"
    special_tokens = ("<|tool_call>", "<tool_call|>", '<|"|>')
    format = ToolFormat(
        open=("<|tool_call>",),
        close=("<tool_call|>",),
        between="",
        calls=(
            LiteralCall(
                CallHead("call:", ("{",)),
                Literals(quotes=('<|"|>', '"'), escapes=False, assign=":", end="}", separator=",", bare=_GEMMA_WORD),
            ),
        ),
    )
