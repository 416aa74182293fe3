"""Stand-ins for the messages that vLLM's parsers take and give."""

from __future__ import annotations

import secrets
from enum import IntEnum
from typing import Any, Self

from msgspec import Struct, convert, field, json, structs, to_builtins


class PlainModel(Struct, kw_only=True):
    """The part of pydantic that parser files use: construction by keyword, with plain objects for nested ones, and
    dumps.
    """

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Make a message of an object. Raises ValidationError, which is a ValueError."""
        return convert(obj, cls)

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        plain = to_builtins(self)
        return _without_none(plain) if exclude_none else plain  # type: ignore[no-any-return]

    def model_dump_json(self, *, exclude_none: bool = False, **_: Any) -> str:
        return json.encode(self.model_dump(exclude_none=exclude_none)).decode()

    def model_copy(self, *, update: dict[str, Any] | None = None, **_: Any) -> Self:
        return structs.replace(self, **(update or {}))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def random_uuid() -> str:
    return secrets.token_hex(16)


def _new_id() -> str:
    return f"chatcmpl-tool-{random_uuid()}"


class FunctionCall(PlainModel, kw_only=True):
    name: str
    arguments: str = ""


class ToolCall(PlainModel, kw_only=True):
    id: str = field(default_factory=_new_id)
    type: str = "function"
    function: FunctionCall

    def __post_init__(self) -> None:
        if isinstance(self.function, dict):
            self.function = FunctionCall(**self.function)


class ExtractedToolCallInformation(PlainModel, kw_only=True):
    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class DeltaFunctionCall(PlainModel, kw_only=True):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(PlainModel, kw_only=True):
    id: str | None = None
    type: str | None = None
    index: int
    function: DeltaFunctionCall | None = None

    def __post_init__(self) -> None:
        if isinstance(self.function, dict):
            self.function = DeltaFunctionCall(**self.function)


class InitialDeltaToolCall(DeltaToolCall, kw_only=True):
    """The first delta of a call, in vLLM 0.6."""

    id: str | None = field(default_factory=_new_id)
    type: str | None = "function"


class ChatMessage(PlainModel, kw_only=True):
    role: str
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


class DeltaMessage(PlainModel, kw_only=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tool_calls = [DeltaToolCall(**call) if isinstance(call, dict) else call for call in self.tool_calls]


class FunctionDefinition(PlainModel, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatCompletionToolsParam(PlainModel, kw_only=True):
    type: str = "function"
    function: FunctionDefinition


class ChatCompletionNamedFunction(PlainModel, kw_only=True):
    name: str


class ChatCompletionNamedToolChoiceParam(PlainModel, kw_only=True):
    type: str = "function"
    function: ChatCompletionNamedFunction


class ChatCompletionRequest(PlainModel, kw_only=True, dict=True):
    """The request, as far as a parser may read it: `tools`, `tool_choice`, `stream` and `chat_template_kwargs` are
    those of the request, the others have their defaults. Any attribute may be set; `adjust_request` changes the request
    by `skip_special_tokens` only.
    """

    messages: list[Any] = field(default_factory=list)
    model: str | None = None
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: Any = "none"
    parallel_tool_calls: bool | None = True
    stream: bool | None = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_reasoning: bool = True
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_grammar: str | None = None
    response_format: Any = None


class ResponsesRequest(PlainModel, kw_only=True):
    """A name for annotations and `isinstance` only: no request is one."""


class StructuredOutputsParams(PlainModel, kw_only=True, dict=True):
    """Guided decoding, as a parser may ask for it in `adjust_request`: it has no effect."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


class ToolStrictLevel(IntEnum):
    """Names for annotations and defaults: calls are read, not enforced."""

    AUTO = 0
    FUNCTION = 1
    PARAMETER = 2


class VLLMValidationError(ValueError):
    """A wrong value of a request's field."""

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class ModelConfig:
    """A name for annotations only."""


class ToolServer:
    """A name for annotations only."""


class MistralTokenizer:
    """A name for `isinstance` only: no tokenizer is one."""
