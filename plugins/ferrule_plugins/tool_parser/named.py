"""Calls with a name in markup and JSON arguments behind it."""

from __future__ import annotations

import secrets
import string
from typing import Any

from ferrule.forms import GrammarSpec
from ferrule.interfaces.parsers import ChoiceContext
from ferrule_parsing import CallHead, FormatParser, JsonCall, NamedJson, ToolFormat

_TAG, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_CHARACTERS = ((string.ascii_letters + string.digits) * 5)[:256].encode()  # a character for each byte
_NEW = NamedJson(CallHead(behind=(_ARGUMENTS, ""), id_mark=_ID))
_OLD = JsonCall()


def _short_id() -> str:
    """Make an id of nine letters or digits, which is what Mistral's chat templates accept."""
    return secrets.token_bytes(9).translate(_ID_CHARACTERS).decode()


class Mistral(FormatParser):
    """`mistral`: Mistral's models. A name and arguments behind the tag, or with older tokenizers a list of objects.

        [TOOL_CALLS]get_weather[ARGS]{"city": "Lisbon"}
        [TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Lisbon"}
        [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Lisbon"}}]

    What is generated under a constraint depends on the tokenizer: only the newer ones know ``[ARGS]``. Chat templates
    refuse ids of calls that are not nine letters and digits.
    https://github.com/mistralai/mistral-common, https://huggingface.co/mistralai/Mistral-Small-3.2-24B-Instruct-2506
    """

    conformance = "ferrule_testkit.samples.tool_parser:MISTRAL"
    special_tokens = (_TAG, _ID, _ARGUMENTS)
    format = ToolFormat(open=(_TAG,), brackets=("[", "]"), separator=", ", calls=(_OLD, _NEW))
    new_id = staticmethod(_short_id)
    named_format = ToolFormat(open=(_TAG,), between="", calls=(_NEW,))

    _named = False  # calls are generated with a name in front of the arguments

    def begin(self, context: ChoiceContext) -> None:
        tokenizer = context.tokenizer
        self._named = tokenizer is not None and len(tokenizer.encode(_ARGUMENTS, add_special_tokens=False)) == 1
        super().begin(context)

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        if not self._named:
            return super().constraint(choice)
        return self._constraint(self.named_format, choice)


class KimiK2(FormatParser):
    """`kimi_k2`: Kimi K2, which numbers its calls. The number is a part of the call's id, which the model expects back.
    Some outputs lack the tags of the section, or misspell them.

        <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
        {"city": "Lisbon"}<|tool_call_end|><|tool_calls_section_end|>

    https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
    """

    conformance = "ferrule_testkit.samples.tool_parser:KIMI_K2"
    special_tokens = (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    )
    format = ToolFormat(
        open=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
        close=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        separator="",
        calls=(
            NamedJson(
                CallHead("<|tool_call_begin|>", ("<|tool_call_argument_begin|>",), prefix="functions.", numbered=True),
                end="<|tool_call_end|>",
            ),
        ),
    )


class Apertus(FormatParser):
    """`apertus`: Apertus, whose calls are objects with the function's name as their only key.

        <|tools_prefix|>[{"get_weather": {"city": "Lisbon"}}]<|tools_suffix|>

    https://huggingface.co/swiss-ai/Apertus-8B-Instruct-2509
    """

    conformance = "ferrule_testkit.samples.tool_parser:APERTUS"
    special_tokens = ("<|tools_prefix|>", "<|tools_suffix|>")
    format = ToolFormat(
        open=("<|tools_prefix|>",),
        close=("<|tools_suffix|>",),
        brackets=("[", "]"),
        separator=", ",
        calls=tuple(NamedJson(CallHead(before, ('": ', '" : ')), end="}") for before in ('{"', '{ "')),
    )
