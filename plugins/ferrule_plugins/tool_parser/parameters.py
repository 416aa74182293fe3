"""Calls between tags, whose arguments stand between tags of their own."""

from __future__ import annotations

from ferrule_parsing import CallHead, FormatParser, Parameters, ToolFormat


class Qwen3Coder(FormatParser):
    """`qwen3_coder` and `qwen3_xml`: Qwen3-Coder and later models of the family, as their chat templates write calls.
    `mimo` and `step3p5`: MiMo and Step 3.5 write them in the same way.

        <tool_call>
        <function=get_weather>
        <parameter=city>
        Lisbon
        </parameter>
        </function>
        </tool_call>

    Some outputs lack the outer tag, or what ends a value, as the parser in the model's repository expects.
    https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct
    """

    conformance = "ferrule_testkit.samples.tool_parser:QWEN3_CODER"
    format = ToolFormat(
        open=("<tool_call>", "<function="),
        close=("</tool_call>",),
        padding=("\n", "\n"),
        calls=(
            Parameters(
                CallHead("<function=", (">",)),
                key="<parameter=",
                behind_key=((">", None),),
                end_value="</parameter>",
                end="</function>",
                padding="\n",
            ),
        ),
    )


class Glm45(FormatParser):
    """`glm45` and `glm47`: GLM 4.5 and later, as their chat templates write calls; 4.7 without the line breaks.
    `poolside_v1`: Laguna writes them in the same way.

        <tool_call>get_weather
        <arg_key>city</arg_key>
        <arg_value>Lisbon</arg_value>
        </tool_call>

    https://huggingface.co/zai-org/GLM-4.5
    """

    conformance = "ferrule_testkit.samples.tool_parser:GLM45"
    special_tokens = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    format = ToolFormat(
        open=("<tool_call>",),
        close=("</tool_call>",),
        calls=(
            Parameters(
                CallHead(),
                key="<arg_key>",
                behind_key=(("</arg_key>\n<arg_value>", None),),
                end_value="</arg_value>",
                undeclared_json=True,
            ),
        ),
    )


class Glm47(Glm45):
    """The format of `Glm45` without line breaks; some outputs have them all the same."""

    conformance = "ferrule_testkit.samples.tool_parser:GLM47"
    format = ToolFormat(
        open=("<tool_call>",),
        close=("</tool_call>",),
        between="",
        calls=(
            Parameters(
                CallHead(),
                key="<arg_key>",
                behind_key=(("</arg_key><arg_value>", None), ("</arg_key>\n<arg_value>", None)),
                end_value="</arg_value>",
                gap="",
                undeclared_json=True,
            ),
        ),
    )


class MiniMaxM2(FormatParser):
    """`minimax_m2`: MiniMax M2, as its tool calling guide describes calls.

        <minimax:tool_call>
        <invoke name="get_weather">
        <parameter name="city">Lisbon</parameter>
        </invoke>
        </minimax:tool_call>

    https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md
    """

    conformance = "ferrule_testkit.samples.tool_parser:MINIMAX_M2"
    special_tokens = ("<minimax:tool_call>", "</minimax:tool_call>")
    format = ToolFormat(
        open=("<minimax:tool_call>",),
        close=("</minimax:tool_call>",),
        separator="\n",
        padding=("\n", "\n"),
        calls=(
            Parameters(
                CallHead('<invoke name="', ('">',)),
                key='<parameter name="',
                behind_key=(('">', None),),
                end_value="</parameter>",
                end="</invoke>",
            ),
        ),
    )


class HyV3(FormatParser):
    """`hy_v3`: Hunyuan 3, whose calls stand together in one block.

        <tool_calls>
        <tool_call>get_weather<tool_sep>
        <arg_key>city</arg_key>
        <arg_value>Lisbon</arg_value>
        </tool_call>
        </tool_calls>

    https://github.com/vllm-project/vllm, the parser `hy_v3`
    """

    conformance = "ferrule_testkit.samples.tool_parser:HY_V3"
    special_tokens = (
        *("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    )
    format = ToolFormat(
        open=("<tool_calls>",),
        close=("</tool_calls>",),
        separator="\n",
        padding=("\n", "\n"),
        calls=(
            Parameters(
                CallHead("<tool_call>", ("<tool_sep>",)),
                key="<arg_key>",
                behind_key=(("</arg_key>\n<arg_value>", None),),
                end_value="</arg_value>",
                end="</tool_call>",
            ),
        ),
    )


class MiniCpm5(FormatParser):
    """`minicpm5`: MiniCPM 5, as its chat template writes calls. Values may be CDATA sections.

        <function name="get_weather"><param name="city">Lisbon</param></function>
        <function name="get_weather"><param name="city"><![CDATA[<b>Lisbon</b>]]></param></function>

    The tags are special tokens, and some outputs lack the space behind them.
    https://github.com/vllm-project/vllm, the parser `minicpm5`
    """

    conformance = "ferrule_testkit.samples.tool_parser:MINICPM5"
    special_tokens = ("<function", "</function>", "<param", "</param>")
    format = ToolFormat(
        open=('<function name="', '<functionname="'),
        close=("</function>",),
        calls=(
            Parameters(
                CallHead(behind=('">',)),
                key='<param name="',
                behind_key=(('">', None), ('"><![CDATA[', None)),
                end_value="</param>",
                gap="",
                quotes=("<![CDATA[", "]]>"),
            ),
        ),
    )


class SolarOpen2(FormatParser):
    """`solar_open2`: Solar Open 2.

        <|tool_call:start|>get_weather
        <|tool_arg:start|>city<|tool_arg:value|>Lisbon<|tool_arg:end|>
        <|tool_call:end|>

    https://github.com/vllm-project/vllm, the parser `solar_open2`
    """

    conformance = "ferrule_testkit.samples.tool_parser:SOLAR_OPEN2"
    special_tokens = (
        *("<|tool_call:start|>", "<|tool_call:end|>"),
        *("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"),
    )
    format = ToolFormat(
        open=("<|tool_call:start|>",),
        close=("<|tool_call:end|>",),
        calls=(
            Parameters(
                CallHead(),
                key="<|tool_arg:start|>",
                behind_key=(("<|tool_arg:value|>", None),),
                end_value="<|tool_arg:end|>",
            ),
        ),
    )


class SeedOss(FormatParser):
    """`seed_oss`: Seed-OSS, as its chat template writes calls.

        <seed:tool_call>
        <function=get_weather>
        <parameter=city>Lisbon</parameter>
        </function>
        </seed:tool_call>

    https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct
    """

    conformance = "ferrule_testkit.samples.tool_parser:SEED_OSS"
    special_tokens = ("<seed:tool_call>", "</seed:tool_call>")
    format = ToolFormat(
        open=("<seed:tool_call>",),
        close=("</seed:tool_call>",),
        padding=("\n", "\n"),
        calls=(
            Parameters(
                CallHead("<function=", (">",)),
                key="<parameter=",
                behind_key=((">", None),),
                end_value="</parameter>",
                end="</function>",
            ),
        ),
    )


class Step3(FormatParser):
    """`step3`: Step 3, as its chat template writes calls.

        <｜tool_calls_begin｜>
        <｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">
        <steptml:parameter name="city">Lisbon</steptml:parameter>
        </steptml:invoke><｜tool_call_end｜>
        <｜tool_calls_end｜>

    https://huggingface.co/stepfun-ai/step3
    """

    conformance = "ferrule_testkit.samples.tool_parser:STEP3"
    special_tokens = (
        *("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        *("<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
    )
    format = ToolFormat(
        open=("<｜tool_calls_begin｜>",),
        close=("<｜tool_calls_end｜>",),
        separator="\n",
        padding=("\n", "\n"),
        calls=(
            Parameters(
                CallHead('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', ('">',)),
                key='<steptml:parameter name="',
                behind_key=(('">', None),),
                end_value="</steptml:parameter>",
                end="</steptml:invoke>",
                behind="<｜tool_call_end｜>",
            ),
        ),
    )
