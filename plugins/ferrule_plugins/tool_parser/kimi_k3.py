"""`kimi_k3`: calls of Kimi K3, whose messages are elements of channels.

    <|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Lisbon<|close|>argument<|sep|>
    <|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

All of it stands on one line. Under a constraint every call is numbered 1.
https://github.com/sgl-project/sglang and https://github.com/vllm-project/vllm, their
parsers `kimi_k3`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ferrule.forms import Form
from ferrule_parsing import CallHead, CallWriter, FormatParser, Parameters, ToolFormat, argument_schemas

_KINDS = ("number", "integer", "boolean", "object", "array", "null")
_STRING = ('" type="string"<|sep|>', True)


class _Typed(Parameters):
    """Parameters that name the type of each value."""

    def _value(self, schema: dict[str, Any]) -> Form | None:
        kinds = argument_schemas.types(schema)
        if len(kinds) != 1 or kinds == {"string"}:
            return super()._value(schema)
        kind = "number" if "integer" in kinds else next(iter(kinds))
        typed = replace(self, behind_key=(_STRING, (f'" type="{kind}"<|sep|>', False)))
        return super(_Typed, typed)._value(schema)


class _Writer(CallWriter):
    """A writer that gives calls ids of its own: the number of a call is not an id."""

    def start(self, name: str, id: str | None = None) -> None:
        super().start(name)


class KimiK3(FormatParser):
    conformance = "ferrule_testkit.samples.tool_parser:KIMI_K3"
    special_tokens = ("<|open|>", "<|close|>", "<|sep|>")
    format = ToolFormat(
        open=("<|open|>tools<|sep|>",),
        close=("<|close|>tools<|sep|>",),
        separator="",
        calls=(
            _Typed(
                CallHead('<|open|>call tool="', ('" index="1"<|sep|>', '"<|sep|>'), id_mark='" index="'),
                key='<|open|>argument key="',
                behind_key=(_STRING, *((f'" type="{kind}"<|sep|>', False) for kind in _KINDS)),
                end_value="<|close|>argument<|sep|>",
                end="<|close|>call<|sep|>",
                gap="",
            ),
        ),
        dropped=(("<|open|>", "<|sep|>"), ("<|close|>", "<|sep|>")),
    )

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tools)
        self._out = _Writer()
