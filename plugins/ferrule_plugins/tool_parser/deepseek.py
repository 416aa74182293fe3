"""Calls of DeepSeek's models. The vertical lines and the low lines of their tags are ``｜`` and ``▁``."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_parsing import CallHead, FormatParser, NamedJson, Parameters, ToolFormat

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_MISSPELT = ("<｜tool_calls_begin｜>", "<｜tool calls begin｜>", "<｜tool\\_calls\\_begin｜>", "<｜tool▁calls｜>")
# The fence in front of arguments: as the templates write it, and as models mangle it or leave it out.
_FENCES = (
    *(f"\n{'`' * ticks}{word}\n" for ticks in (3, 1, 2, 4) for word in ("json", " json", "JSON", "")),
    "\njson\n",
    "",
)
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")


@dataclass(frozen=True)
class _Fenced(NamedJson):
    """Arguments in a fence, of which any part may be missing, or more be there."""

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*super().marks, "```json", "`")


class DeepSeekV3(FormatParser):
    """`deepseek_v3`: DeepSeek V3 and R1, as their chat templates write calls.

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
        ```json
        {"city": "Lisbon"}
        ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    Small models distilled from R1 misspell the first tag and leave out the second one.
    https://huggingface.co/deepseek-ai/DeepSeek-V3-0324
    """

    conformance = "ferrule_testkit.samples.tool_parser:DEEPSEEK_V3"
    special_tokens = (*_SECTION, *_CALL)
    format = ToolFormat(
        open=(_SECTION[0], *_MISSPELT),
        close=(_SECTION[1],),
        separator="\n",
        calls=tuple(
            _Fenced(CallHead(f"{begin}function{_CALL[1]}", _FENCES), end=f"\n```{_CALL[2]}") for begin in (_CALL[0], "")
        ),
    )


class DeepSeekV31(FormatParser):
    """`deepseek_v31`: DeepSeek V3.1, as its chat template writes calls.

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Lisbon"}<｜tool▁call▁end｜>
        <｜tool▁calls▁end｜>

    https://huggingface.co/deepseek-ai/DeepSeek-V3.1
    """

    conformance = "ferrule_testkit.samples.tool_parser:DEEPSEEK_V31"
    special_tokens = (*_SECTION, *_CALL)
    format = ToolFormat(
        open=(_SECTION[0],),
        close=(_SECTION[1],),
        separator="",
        calls=(NamedJson(CallHead(_CALL[0], (_CALL[1],)), end=_CALL[2]),),
    )


_DSML = (
    Parameters(
        CallHead('<｜DSML｜invoke name="', ('">',)),
        key='<｜DSML｜parameter name="',
        behind_key=(('" string="true">', True), ('" string="false">', False), ('">', None)),
        end_value="</｜DSML｜parameter>",
        end="</｜DSML｜invoke>",
    ),
)


class DeepSeekV32(FormatParser):
    """`deepseek_v32`: DeepSeek V3.2, whose card and encoding script describe this markup.

        <｜DSML｜function_calls>
        <｜DSML｜invoke name="get_weather">
        <｜DSML｜parameter name="city" string="true">Lisbon</｜DSML｜parameter>
        <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
        </｜DSML｜invoke>
        </｜DSML｜function_calls>

    https://huggingface.co/deepseek-ai/DeepSeek-V3.2
    """

    conformance = "ferrule_testkit.samples.tool_parser:DEEPSEEK_V32"
    special_tokens = ("｜DSML｜",)
    format = ToolFormat(
        dropped=(("<｜DSML｜", ">"), ("</｜DSML｜", ">")),
        open=("<｜DSML｜function_calls>",),
        close=("</｜DSML｜function_calls>",),
        separator="\n",
        padding=("\n", "\n"),
        calls=_DSML,
    )


class DeepSeekV4(DeepSeekV32):
    """`deepseek_v4`: DeepSeek V4, which writes calls as V3.2 does, in a block of another name.

        <｜DSML｜tool_calls>
        <｜DSML｜invoke name="get_weather">
        <｜DSML｜parameter name="city" string="true">Lisbon</｜DSML｜parameter>
        </｜DSML｜invoke>
        </｜DSML｜tool_calls>

    https://github.com/vllm-project/vllm, the parser and the tests of `deepseek_v4`
    """

    conformance = "ferrule_testkit.samples.tool_parser:DEEPSEEK_V4"
    format = ToolFormat(
        open=("<｜DSML｜tool_calls>",),
        close=("</｜DSML｜tool_calls>",),
        separator="\n",
        padding=("\n", "\n"),
        calls=_DSML,
    )
