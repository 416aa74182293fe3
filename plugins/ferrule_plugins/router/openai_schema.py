"""Bodies of the OpenAI routes, with the documented extra fields. `null` means the same as an absent field.

Descriptions and ranges are for the schema; the service checks values, and words its refusals better than a decoder.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

# What the service checks, told to those who read the schema; it words its refusals better than a decoder would.
Count = Annotated[Int, Meta(extra_json_schema={"minimum": 1})]
Size = Annotated[Int, Meta(extra_json_schema={"minimum": 0})]
SizeOrAll = Annotated[Int, Meta(extra_json_schema={"minimum": -1})]
Priority = Annotated[Int, Meta(extra_json_schema={"minimum": -(1 << 31), "maximum": (1 << 31) - 1})]
Share = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
ShareAboveZero = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})]
Penalty = Annotated[float, Meta(extra_json_schema={"minimum": -2, "maximum": 2})]
Factor = Annotated[float, Meta(extra_json_schema={"minimum": 1e-6, "maximum": 1e6})]
Temperature = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1e6})]
Piece = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": 1024})]
Id = Annotated[str, Meta(extra_json_schema={"pattern": "^[A-Za-z0-9._:-]{1,128}$"})]
Salt = Annotated[str, Meta(extra_json_schema={"pattern": "^[ -~]{1,256}$"})]
Format = Annotated[
    dict[str, Any], Meta(extra_json_schema={"required": ["type"], "properties": {"type": {"const": "text"}}})
]
Talk = Annotated[
    list[dict[str, Any]],
    Meta(
        extra_json_schema={
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"type": "string", "minLength": 1, "maxLength": 64},
                    "content": {"type": ["string", "array", "null"]},
                },
            },
        }
    ),
]
Tools = Annotated[
    list[dict[str, Any]],
    Meta(
        extra_json_schema={
            "minItems": 1,
            "maxItems": 1024,
            "items": {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string", "minLength": 1}},
                    },
                },
            },
        }
    ),
]
Effort = Annotated[str, Meta(extra_json_schema={"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]})]
Side = Annotated[str, Meta(extra_json_schema={"enum": ["left", "right"]})]


def says(text: str) -> Meta:
    """What a field does, for those who read the schema."""
    return Meta(description=text)


def absent(feature: str, *harmless: Any) -> Meta:
    """Of a feature that is not here: null, or a value that asks for nothing. See `openai_fields.ABSENT`."""
    values = {"enum": [None, *harmless]} if harmless else {"type": "null"}
    return Meta(description=f"Not available in this build: {feature}.", extra_json_schema=values)


def idle(why: str) -> Meta:
    """Known and without effect: the answer carries a warning."""
    return Meta(description=f"No effect, named in the answer's warnings: {why}.")


# ------------------------------------------------------------------------------------------ what comes in


class StreamOptions(Struct, kw_only=True):
    include_usage: Annotated[bool | None, says("One more chunk before the end: `usage`, and no choices.")] = None
    continuous_usage_stats: Annotated[
        bool | None, says("Each chunk tells its choice's usage so far. Needs `include_usage`.")
    ] = None


class GenerateBody(Struct, kw_only=True):
    """What completions and chat have in common. null means the same as an absent field."""

    model: Annotated[str | None, says("One of the served names. Default: the first.")] = None
    # sampling: the names of SamplingParams
    n: Annotated[Count | None, says("Answers for each prompt. 1 or more; default 1.")] = None
    best_of: Annotated[
        Count | None,
        says("Generate so many, return the `n` whose tokens have the highest sum of logprobs. At least `n`."),
    ] = None
    presence_penalty: Annotated[
        Penalty | None, says("Against tokens that the answer has already. −2 to 2; default 0.")
    ] = None
    frequency_penalty: Annotated[
        Penalty | None, says("The same, for each time that the token occurs. −2 to 2; default 0.")
    ] = None
    repetition_penalty: Annotated[
        Factor | None, says("Above 1: against tokens of the prompt and the answer. From 1e-6; default 1.")
    ] = None
    temperature: Annotated[
        Temperature | None, says("0: always the likeliest token; higher: more varied. Default: the model's, else 1.")
    ] = None
    top_p: Annotated[
        ShareAboveZero | None,
        says("Draw from the likeliest tokens that make up this share. Above 0, to 1; default: all."),
    ] = None
    top_k: Annotated[SizeOrAll | None, says("Draw from so many likeliest tokens. −1 and 0: off.")] = None
    min_p: Annotated[
        Share | None, says("Leave out tokens below this share of the likeliest one's probability. 0 to 1; 0: off.")
    ] = None
    seed: Annotated[Int | None, says("The same seed and request draw the same tokens. −1 or absent: a random one.")] = (
        None
    )
    stop: Annotated[str | list[Piece] | None, says("Texts that end the answer; they are not part of it.")] = None
    stop_token_ids: Annotated[list[Size] | None, says("Tokens that end the answer.")] = None
    bad_words: Annotated[list[Piece] | None, says("Words that the answer must not have.")] = None
    include_stop_str_in_output: Annotated[bool | None, says("Keep the stop text in the answer. Default: false.")] = None
    ignore_eos: Annotated[
        bool | None, says("Go on after the end-of-sequence token, up to `max_tokens`. Default: false.")
    ] = None
    max_tokens: Annotated[
        Size | None, says("Most tokens to generate. Default: 16 for completions, what the context has left for chat.")
    ] = None
    min_tokens: Annotated[Size | None, says("No end before so many tokens. Default: 0.")] = None
    prompt_logprobs: Annotated[
        SizeOrAll | None, says("Logprobs of the prompt's tokens, with so many likeliest ones each. Not with `stream`.")
    ] = None
    skip_special_tokens: Annotated[bool | None, says("Leave special tokens out of the text. Default: true.")] = None
    spaces_between_special_tokens: Annotated[bool | None, says("Default: true.")] = None
    truncate_prompt_tokens: Annotated[
        SizeOrAll | None, says("Keep so many tokens of the prompt; −1: as many as fit.")
    ] = None
    truncation_side: Annotated[
        Side | None, says("Where `truncate_prompt_tokens` cuts: `left`, the default, keeps the last tokens.")
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None, says("Added to logits: token id → −100 to 100, beyond it is cut.")
    ] = None
    allowed_token_ids: Annotated[list[Size] | None, says("No other tokens may be generated.")] = None
    # the answer's form
    stream: Annotated[bool | None, says("Answer with server-sent events. Default: false.")] = None
    stream_options: Annotated[StreamOptions | None, says("Needs `stream`.")] = None
    echo: Annotated[
        bool | None, says("Send the prompt before the answer; chat: the last message, if the answering role wrote it.")
    ] = None
    return_tokens_as_token_ids: Annotated[bool | None, says("Show tokens as `token_id:N` in logprobs.")] = None
    return_token_ids: Annotated[bool | None, says("Add `token_ids` and `prompt_token_ids` to the answer.")] = None
    return_prompt_text: Annotated[bool | None, says("Add `prompt_text`, the text that the model saw.")] = None
    # beam search instead of sampling: n, or best_of, is the width
    use_beam_search: Annotated[
        bool | None, says("The likeliest texts instead of samples: `n` beams, or `best_of` of which `n` come back.")
    ] = None
    length_penalty: Annotated[
        float | None, says("Of beam search: a text scores its sum of logprobs / length ** this. Default: 1.")
    ] = None
    early_stopping: Annotated[
        bool | None, says("Of beam search: end as soon as all beams have finished. Default: false.")
    ] = None
    # the rest
    add_special_tokens: Annotated[
        bool | None, says("The tokenizer adds its own tokens. Default: true for completions, false for chat.")
    ] = None
    priority: Annotated[
        Priority | None, says("Lower runs first; 0 by default. Needs `--scheduling-policy priority`.")
    ] = None
    request_id: Annotated[
        Id | None, says("End of the answer's `id`. Default: the header `X-Request-Id`, else a random one.")
    ] = None
    cache_salt: Annotated[Salt | None, says("Share cached prefixes only with requests of the same salt.")] = None
    logits_processors: Annotated[
        list[str | dict[str, Any]] | None, says("Plugins by name, or `{qualname, kwargs}`, that the server allows.")
    ] = None
    response_format: Annotated[Format | None, says('`{"type": "text"}`.')] = None
    # notes: for the log
    user: Annotated[str | None, says("A note for the log, at most 16 KiB.")] = None
    metadata: Annotated[dict[str, Any] | None, says("A note for the log, at most 16 KiB.")] = None
    session_id: Annotated[str | None, says("A note for the log, at most 16 KiB.")] = None
    # known, of features that this build does not have: see `openai_fields.ABSENT`
    guided_json: Annotated[Any, absent("guided decoding")] = None
    guided_regex: Annotated[Any, absent("guided decoding")] = None
    guided_choice: Annotated[Any, absent("guided decoding")] = None
    guided_grammar: Annotated[Any, absent("guided decoding")] = None
    guided_decoding_backend: Annotated[Any, idle("there is no guided decoding in this build")] = None
    guided_whitespace_pattern: Annotated[Any, idle("there is no guided decoding in this build")] = None
    structured_outputs: Annotated[Any, absent("guided decoding")] = None
    thinking_token_budget: Annotated[Any, absent("a budget for thinking", -1)] = None
    repetition_detection: Annotated[Any, absent("an end at repeated patterns")] = None
    vllm_xargs: Annotated[Any, absent("arguments of the server's processors", {})] = None
    logprob_token_ids: Annotated[Any, absent("logprobs of chosen tokens", [])] = None
    watermarking: Annotated[Any, absent("watermarking", False)] = None
    kv_transfer_params: Annotated[Any, idle("no KV connector runs here")] = None
    ec_transfer_params: Annotated[Any, idle("no KV connector runs here")] = None
    return_token_offsets: Annotated[Any, idle("completions give text_offset")] = None
    return_weight_versions: Annotated[Any, idle("weights have no versions here")] = None
    routed_experts_prompt_start: Annotated[Any, idle("choices of experts are not returned")] = None
    stream_interval: Annotated[Any, idle("each chunk is sent as soon as it is there")] = None
    service_tier: Annotated[Any, idle("there is one tier; priority orders requests")] = None
    store: Annotated[Any, idle("answers are not stored")] = None


class CompletionBody(GenerateBody, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Annotated[
        str | list[str | Int | list[Int]] | None,
        says("A string, a list of strings, token ids, or a list of lists of token ids."),
    ] = None
    prompt_embeds: Annotated[
        str | list[str] | None,
        says("Prompts as tensors [tokens, hidden], base64 of a file. Needs `--enable-prompt-embeds`."),
    ] = None
    suffix: Annotated[str | None, says("What follows the answer. Needs a model with tokens to fill in the middle.")] = (
        None
    )
    logprobs: Annotated[
        SizeOrAll | None, says("Logprobs of the tokens, with so many likeliest ones each; −1: of all tokens.")
    ] = None


class ChatBody(GenerateBody, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[Talk, says("The conversation: objects with `role` and `content`.")]
    max_completion_tokens: Annotated[Count | None, says("The present name of `max_tokens`; it wins over that.")] = None
    logprobs: Annotated[bool | None, says("Give the logprobs of the tokens. Default: false.")] = None
    top_logprobs: Annotated[
        SizeOrAll | None, says("With so many likeliest ones each; −1: of all tokens. Needs `logprobs`.")
    ] = None
    tools: Annotated[Tools | None, says("Functions that the model may call.")] = None
    tool_choice: Annotated[str | dict[str, Any] | None, says("`auto`, or `none`: no calls.")] = None
    parallel_tool_calls: Annotated[bool | None, says("false: one call at most. Default: true.")] = None
    include_reasoning: Annotated[bool | None, says("false: leave the reasoning out of the answer. Default: true.")] = (
        None
    )
    reasoning_effort: Annotated[
        Effort | None, says("For the template: `reasoning_effort`, and `enable_thinking`, false for `none`.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, says("Begin a new message. Default: true, unless the final one is continued.")
    ] = None
    continue_final_message: Annotated[bool | None, says("Go on with the last message. Default: false.")] = None
    documents: Annotated[list[dict[str, Any]] | None, says("For the template: texts to answer from.")] = None
    chat_template: Annotated[str | None, says("Another template. Needs `--trust-request-chat-template`.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, says("Variables for the template.")] = None
    safety_identifier: Annotated[str | None, says("A note for the log, at most 16 KiB.")] = None
    # known, of features that this build does not have
    functions: Annotated[Any, absent("OpenAI deprecates it; use tools", [], "none")] = None
    function_call: Annotated[Any, absent("OpenAI deprecates it; use tool_choice", [], "none")] = None
    modalities: Annotated[Any, absent("output other than text", ["text"], [])] = None
    audio: Annotated[Any, absent("audio output")] = None
    web_search_options: Annotated[Any, absent("web search")] = None
    verbosity: Annotated[Any, absent("verbosity other than medium", "medium")] = None
    moderation: Annotated[Any, idle("answers are not moderated")] = None
    prediction: Annotated[Any, idle("answers are not predicted")] = None
    prompt_cache_key: Annotated[Any, idle("cache_salt keeps prefixes apart")] = None
    prompt_cache_options: Annotated[Any, idle("cache_salt keeps prefixes apart")] = None
    prompt_cache_retention: Annotated[Any, idle("cache_salt keeps prefixes apart")] = None
    mm_processor_kwargs: Annotated[Any, idle("this model takes text")] = None
    media_io_kwargs: Annotated[Any, idle("this model takes text")] = None
    return_mm_kwargs: Annotated[Any, idle("this model takes text")] = None


class AnyBody(ChatBody, kw_only=True):
    """``POST /invocations``: the body of a chat if it has `messages`, of completions if it has a prompt."""

    messages: Annotated[Talk | None, says("The conversation. With it the body is that of /v1/chat/completions.")] = None
    prompt: Annotated[
        str | list[str | Int | list[Int]] | None, says("With it the body is that of /v1/completions.")
    ] = None
    prompt_embeds: Annotated[str | list[str] | None, says("As of /v1/completions.")] = None
    suffix: Annotated[str | None, says("As of /v1/completions.")] = None
    logprobs: Annotated[bool | SizeOrAll | None, says("Chat: true or false; completions: a number.")] = None
