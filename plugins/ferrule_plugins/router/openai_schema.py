"""Bodies of the OpenAI routes, with the documented extra fields. `null` means the same as an absent field."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


# ------------------------------------------------------------------------------------------ what comes in


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerateBody(Struct, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    # sampling: the names of SamplingParams
    n: Int | None = None
    best_of: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    prompt_logprobs: Int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int] | None = None
    # the answer's form
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    # the rest
    add_special_tokens: bool | None = None
    priority: Int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    logits_processors: list[str | dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None
    # known, and refused when they ask for something
    use_beam_search: bool | None = None
    length_penalty: float | None = None  # of beam search
    early_stopping: bool | None = None  # of beam search
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    structured_outputs: Any = None


class CompletionBody(GenerateBody, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | Int | list[Int]] | None = None
    prompt_embeds: Any = None
    suffix: str | None = None
    logprobs: Int | None = None


class ChatBody(GenerateBody, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# ------------------------------------------------------------------------------------------ what goes out


class PromptTokensDetails(Struct):
    cached_tokens: int


class UsageInfo(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class PromptLogprob(Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct):
    """Parallel lists, one entry per token. The first token of a prompt has no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str = ""
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A whole answer, and also a chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: UsageInfo | None | UnsetType = UNSET


class FunctionCall(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(Struct, kw_only=True):
    """`index` is sent in deltas only; `id` and `type` once per call."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]


class Message(Struct, kw_only=True):
    """A delta of a stream, or the whole message. Reasoning goes out under its old and its new name."""

    role: str | UnsetType = UNSET
    content: str | None | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """`delta` in chunks, `message` in whole answers."""

    index: int
    delta: Message | UnsetType = UNSET
    message: Message | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str | None = None
    usage: UsageInfo | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
