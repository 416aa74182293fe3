"""Answers of the Responses routes: whole ones, and the events of a stream.

As with chat completions, what is sent is plain dicts, and these types are what the OpenAPI document tells of them.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

from ferrule_protocol import Extension

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputDetails(TypedDict):
    """The tokens of the prompt that the prefix cache had. None are written for a price here."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """The tokens of thoughts, and of the markup around them."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class LogprobEntry(TypedDict):
    """A token with its log-probability, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: NotRequired[list[LogprobEntry]]


class ContentPart(TypedDict):
    """A part of an item: `output_text`, or `reasoning_text` without annotations and logprobs."""

    type: Literal["output_text", "reasoning_text", "input_text", "summary_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[LogprobEntry]]


class OutputItem(TypedDict):
    """An item: a `message` with content; `reasoning` with content; a `function_call` with call_id, name, arguments."""

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]
    status: NotRequired[Literal["in_progress", "completed", "incomplete"]]
    role: NotRequired[str]
    content: NotRequired[list[ContentPart]]
    summary: NotRequired[list[ContentPart]]
    encrypted_content: NotRequired[str]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    output: NotRequired[Any]


class ResponseFailure(TypedDict):
    """The reason why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class Response(TypedDict):
    """A response. The fields from `background` on repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    ferrule: NotRequired[Extension]


class ResponseEvent(TypedDict):
    """An event of a stream; the event's name is its `type`."""

    type: str
    sequence_number: int
    response: NotRequired[Response]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item_id: NotRequired[str]
    item: NotRequired[OutputItem]
    part: NotRequired[ContentPart]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    name: NotRequired[str]
    logprobs: NotRequired[list[LogprobEntry]]


class DeletedResponse(TypedDict):
    """The answer to a deletion."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    """Some items of a response's input, and whether there are more."""

    object: Literal["list"]
    data: list[OutputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int
    ferrule: NotRequired[Extension]
