"""Answers of the OpenAI routes, whole ones and chunks of a stream, with fields beyond OpenAI's.

What is sent for each token is a plain dict: nothing is faster to build and to encode. The types of these dicts are what
the OpenAPI document tells, and a test holds what is sent against them.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import BaseModel
from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

from ferrule_protocol import Extension


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class UsageInfo(TypedDict):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(TypedDict):
    """Parallel lists, one entry per token. The first token of a prompt has no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_text: NotRequired[str]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(TypedDict):
    """A whole answer, and also a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: NotRequired[UsageInfo | None]
    ferrule: NotRequired[Extension]  # in a stream, on its first chunk


class FunctionCall(TypedDict):
    name: NotRequired[str]
    arguments: str


class ChatToolCall(TypedDict):
    """`index` is sent in deltas only; `id` and `type` once per call."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[str]
    function: FunctionCall


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]


class ChatCompletionMessage(TypedDict):
    """A delta of a stream, or the whole message. Reasoning is sent under its old and its new name."""

    role: NotRequired[str]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCall]]


class ChatChoice(TypedDict):
    """A choice of an answer: `delta` in chunks, `message` in whole answers."""

    index: int
    delta: NotRequired[ChatCompletionMessage]
    message: NotRequired[ChatCompletionMessage]
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str | None
    usage: NotRequired[UsageInfo | None]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
    prompt_text: NotRequired[str]
    ferrule: NotRequired[Extension]  # in a stream, on its first chunk


class ModelPermission(BaseModel):
    """A record that old clients of OpenAI look for. It is not a right that this server gives or checks."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(BaseModel):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "ferrule"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelCard]
