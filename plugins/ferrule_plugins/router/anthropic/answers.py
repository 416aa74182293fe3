"""Answers of the Messages routes: whole ones, and the events of a stream.

As with chat completions, what is sent is plain dicts, and these types are what the OpenAPI document tells of them.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

from ferrule_protocol import Extension


class MessageUsage(TypedDict):
    """The tokens of a request. The prompt has the sum of the three sorts of input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ContentBlock(TypedDict):
    """A block of an answer: `text`, `thinking` with `signature`, or `tool_use` with `id`, `name` and `input`."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[Any]


class Message(TypedDict):
    """A whole answer; at the start of a stream it is without content and reasons."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    ferrule: NotRequired[Extension]


class BlockDelta(TypedDict):
    """The news of a block, of which `type` names the sort, or of the end of the message."""

    type: NotRequired[Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    partial_json: NotRequired[str]
    stop_reason: NotRequired[str]
    stop_sequence: NotRequired[str | None]


class MessageEvent(TypedDict):
    """An event of a stream; the event's name is its `type`."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: NotRequired[Message]
    index: NotRequired[int]
    content_block: NotRequired[ContentBlock]
    delta: NotRequired[BlockDelta]
    usage: NotRequired[MessageUsage]


class TokenCount(TypedDict):
    """The number of tokens of a prompt."""

    input_tokens: int
    ferrule: NotRequired[Extension]
