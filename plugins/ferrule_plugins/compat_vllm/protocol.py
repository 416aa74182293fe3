"""Stand-ins for the messages that vLLM's parsers take and give."""

from __future__ import annotations

import secrets
from typing import Any

from msgspec import Struct, field, to_builtins


class Message(Struct, kw_only=True):
    """What parser files use of pydantic: construction by keyword, with plain objects for nested ones, and dumps."""

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        plain = to_builtins(self)
        return _without_none(plain) if exclude_none else plain  # type: ignore[no-any-return]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def make_tool_call_id(*_: Any, **__: Any) -> str:
    return f"chatcmpl-tool-{random_uuid()}"


def random_uuid() -> str:
    return secrets.token_hex(16)


class FunctionCall(Message, kw_only=True):
    name: str
    arguments: str = ""


class ToolCall(Message, kw_only=True):
    id: str = field(default_factory=make_tool_call_id)
    type: str = "function"
    function: FunctionCall

    def __post_init__(self) -> None:
        if isinstance(self.function, dict):
            self.function = FunctionCall(**self.function)


class ExtractedToolCallInformation(Message, kw_only=True):
    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class DeltaFunctionCall(Message, kw_only=True):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(Message, kw_only=True):
    id: str | None = None
    type: str | None = None
    index: int
    function: DeltaFunctionCall | None = None

    def __post_init__(self) -> None:
        if isinstance(self.function, dict):
            self.function = DeltaFunctionCall(**self.function)


class DeltaMessage(Message, kw_only=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tool_calls = [DeltaToolCall(**call) if isinstance(call, dict) else call for call in self.tool_calls]


class FunctionDefinition(Message, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatCompletionToolsParam(Message, kw_only=True):
    type: str = "function"
    function: FunctionDefinition


class ChatCompletionNamedFunction(Message, kw_only=True):
    name: str


class ChatCompletionNamedToolChoiceParam(Message, kw_only=True):
    type: str = "function"
    function: ChatCompletionNamedFunction


class ChatCompletionRequest(Message, kw_only=True):
    """What a parser may read of its request. `skip_special_tokens` may be changed by `adjust_request`."""

    messages: list[Any] = field(default_factory=list)
    model: str | None = None
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: Any = "none"
    parallel_tool_calls: bool | None = True
    stream: bool | None = False
    skip_special_tokens: bool = True
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: Any = None
    response_format: Any = None


class ResponsesRequest(Message, kw_only=True):
    """For annotations and `isinstance` only: no request is one."""
