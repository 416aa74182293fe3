"""Bodies of the OpenAI routes: each field once, with its type, its bounds, and its effect, if any."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from ferrule.sampling_params import Biases, LengthPenalty, SamplingFields
from ferrule.schema import (
    Body,
    CacheSalt,
    Count,
    Milliseconds,
    Priority,
    RequestId,
    Size,
    SizeOrAll,
    SomeText,
    Strict,
    Text,
    TokenIds,
    by_type,
    no_effect,
    not_here,
    printable,
    problem,
)
from ferrule.structured_outputs import ConstraintFields
from ferrule_protocol import Conversation, TemplateFields

MAX_NOTE_BYTES = 16 << 10

_MEDIA = no_effect("it has an effect on images, audio and video only, and this model takes text", {})
_TRANSFER = no_effect("no KV connector runs here; the prompt is computed where it arrives", {})
_PROMPT_CACHE = no_effect("prefixes are cached for everybody alike; cache_salt keeps them apart")


def _note(value: Any) -> Any:
    if len(msgspec.json.encode(value)) > MAX_NOTE_BYTES:
        raise problem(f"is limited to {MAX_NOTE_BYTES} bytes")
    return value


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Check arguments for plugins: each must be a plain value, or a list of those, as vLLM documents them."""
    for name, value in values.items():
        if not all(type(each) in _PLAIN for each in (value if isinstance(value, list) else (value,))):
            raise problem(f"'{printable(name)}' is not a text, a number, a boolean, or a list of these")
    _note(values)
    return values


_PLAIN = frozenset({str, int, float, bool})
_LIMITED = AfterValidator(_note)
_NOTE = Field(description="A note for the log, at most 16 KiB.")
NOTES = ("user", "metadata", "session_id", "safety_identifier")


# ------------------------------------------------------------------------------------------------ forms of values


_TOKEN_KEYS = re.compile("(?:-?[0-9]{1,19}(?:,|\\Z))*+")


def _token_keys(values: Any) -> Any:
    """Turn the keys of a JSON object, which are strings, into token ids. All are checked at once: there may be very
    many.
    """
    if not isinstance(values, dict) or not set(map(type, values.values())) <= {int, float}:
        return values  # to be refused
    try:
        if _TOKEN_KEYS.fullmatch(",".join(values)):
            return dict(zip(map(int, values), values.values(), strict=True))
    except ValueError:  # a key with a comma, or an empty one
        pass
    raise problem("must have token ids as keys")


_FORMS: dict[type, str] = {str: "<a list of strings>", list: "<a list of lists of token ids>"}


def _form_of_prompt(value: Any) -> str:
    """Return the form of a prompt; the first item decides it for a list, however long the list is."""
    if isinstance(value, str):
        return "<a string>"
    if isinstance(value, list):
        return _FORMS.get(type(value[0]), "<token ids>") if value else "<a list of strings>"
    return ""


Prompts = Annotated[
    Annotated[Text, Tag("<a string>")]
    | Annotated[list[Text], Tag("<a list of strings>")]
    | Annotated[TokenIds, Tag("<token ids>")]
    | Annotated[list[TokenIds], Tag("<a list of lists of token ids>")],
    Discriminator(_form_of_prompt),
]
TextOrTexts = Annotated[Annotated[Text, Tag("<a string>")] | Annotated[list[Text], Tag("<a list>")], by_type]


class StreamOptions(Strict):
    """Options for the usage that a stream reports."""

    include_usage: Annotated[
        bool | None, Field(description="One more chunk before the end: `usage`, and no choices.")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="Each chunk tells its choice's usage so far. Needs `include_usage`.")
    ] = None


class ProcessorCall(Strict):
    """A logits processor with its arguments."""

    qualname: Annotated[Text, Field(description="Name of a plugin, or import path of what makes the processor.")]
    args: Annotated[list[Any] | None, Field(description="Its arguments by position; a plugin has none.")] = None
    kwargs: Annotated[dict[str, Any] | None, Field(description="Its arguments by name.")] = None


class NamedFunction(Strict):
    """The name of a function."""

    name: Annotated[SomeText, Field(description="One of `tools`.")]


class NamedTool(Strict):
    """A call that the request demands."""

    type: Annotated[Literal["function"], Field(description="`function`.")]
    function: Annotated[NamedFunction, Field(description="The function to call.")]


Processor = Annotated[Annotated[Text, Tag("<a string>")] | Annotated[ProcessorCall, Tag("<an object>")], by_type]
ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<a string>")] | Annotated[NamedTool, Tag("<an object>")],
    by_type,
]


# ------------------------------------------------------------------------------------------------ bodies


class GenerateBody(ConstraintFields, SamplingFields, Body):
    """The fields that completions and chat have in common. null means the same as an absent field."""

    model: Annotated[Text | None, Field(description="One of the served names. Default: the first.")] = None
    logit_bias: Annotated[
        Annotated[Biases, BeforeValidator(_token_keys, json_schema_input_type=dict[str, float])] | None,
        Field(description="Added to logits: token id → −100 to 100, beyond it is cut."),
    ] = None
    # the answer's form
    stream: Annotated[bool, Field(description="Answer with server-sent events. Default: false.")] = False
    stream_options: Annotated[StreamOptions | None, Field(description="Needs `stream`.")] = None
    echo: Annotated[
        bool,
        Field(description="Send the prompt before the answer; chat: the last message, if the answering role wrote it."),
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool | None, Field(description="Show tokens as `token_id:N` in logprobs.")
    ] = None
    return_token_ids: Annotated[
        bool | None,
        Field(description="Add `token_ids` and `prompt_token_ids`. Default: false; true without a tokenizer."),
    ] = None
    return_prompt_text: Annotated[bool, Field(description="Add `prompt_text`, the text that the model saw.")] = False
    # beam search instead of sampling: n, or best_of, is the width
    use_beam_search: Annotated[
        bool,
        Field(description="The likeliest texts instead of samples: `n` beams, or `best_of` of which `n` come back."),
    ] = False
    length_penalty: Annotated[
        LengthPenalty,
        Field(description="Of beam search: a text scores its sum of logprobs / length ** this. Default: 1."),
    ] = 1.0
    early_stopping: Annotated[
        bool, Field(description="Of beam search: end as soon as all beams have finished. Default: false.")
    ] = False
    # the rest
    add_special_tokens: Annotated[
        bool | None,
        Field(description="The tokenizer adds its own tokens. Default: true for completions, false for chat."),
    ] = None
    priority: Annotated[
        Priority, Field(description="Lower runs first; 0 by default. Needs `--scheduling-policy priority`.")
    ] = 0
    target_first_token_ms: Annotated[
        Milliseconds | None,
        Field(description="Milliseconds until the first token, on a server with `--target-first-token-ms`."),
    ] = None
    target_inter_token_ms: Annotated[
        Milliseconds | None,
        Field(description="Milliseconds until each next token, if more than the server's `--target-inter-token-ms`."),
    ] = None
    request_id: Annotated[
        RequestId | None,
        Field(description="End of the answer's `id`. Default: the header `X-Request-Id`, else a random one."),
    ] = None
    cache_salt: Annotated[
        CacheSalt | None, Field(description="Share cached prefixes only with requests of the same salt.")
    ] = None
    logits_processors: Annotated[
        list[Processor] | None,
        Field(description="Plugins by name and functions by import path that `--logits-processor-pattern` allows."),
    ] = None
    vllm_xargs: Annotated[
        Annotated[dict[str, Any], AfterValidator(_plain)] | None,
        Field(
            description="Arguments for plugins, in `TokenSampling.extra_args`: texts, numbers, booleans, "
            "and lists of these; at most 16 KiB."
        ),
    ] = None
    # notes: for the log
    user: Annotated[Annotated[Text, _LIMITED] | None, _NOTE] = None
    metadata: Annotated[Annotated[dict[str, Any], _LIMITED] | None, _NOTE] = None
    session_id: Annotated[Annotated[Text, _LIMITED] | None, _NOTE] = None
    # known, of features that this build does not have
    repetition_detection: Annotated[Any, not_here("an end at repeated patterns")] = None
    logprob_token_ids: Annotated[Any, not_here("the choice of tokens whose logprobs are given", [])] = None
    watermarking: Annotated[Any, not_here("watermarking", False)] = None
    kv_transfer_params: Annotated[Any, _TRANSFER] = None
    ec_transfer_params: Annotated[Any, _TRANSFER] = None
    return_token_offsets: Annotated[
        Any, no_effect("it is for the peer's render routes; completions give text_offset", False)
    ] = None
    return_weight_versions: Annotated[Any, no_effect("weights have no versions here", False)] = None
    routed_experts_prompt_start: Annotated[Any, no_effect("choices of experts are not returned here", 0)] = None
    stream_interval: Annotated[Any, no_effect("each chunk is sent as soon as it is there", 1)] = None
    service_tier: Annotated[Any, no_effect("there is one tier here; priority orders requests", "auto", "default")] = (
        None
    )
    store: Annotated[Any, no_effect("answers are not stored here", False)] = None


class CompletionBody(GenerateBody):
    """``POST /v1/completions``."""

    prompt: Annotated[
        Prompts | None,
        Field(description="A string, a list of strings, token ids, or a list of lists of token ids."),
    ] = None
    prompt_embeds: Annotated[
        TextOrTexts | None,
        Field(description="Prompts as tensors [tokens, hidden], base64 of a file. Needs `--enable-prompt-embeds`."),
    ] = None
    suffix: Annotated[
        Text | None, Field(description="What follows the answer. Needs a model with tokens to fill in the middle.")
    ] = None
    max_tokens: Annotated[
        Size | None, Field(description="Most tokens to generate. Default: 16. With `echo`, 0: the prompt alone.")
    ] = None
    logprobs: Annotated[
        SizeOrAll | None,
        Field(description="Logprobs of the tokens, with so many likeliest ones each; −1: of all tokens."),
    ] = None


class ChatBody(TemplateFields, GenerateBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[Conversation, Field(description="The conversation: objects with `role` and `content`.")]
    max_tokens: Annotated[
        Count | None, Field(description="Most tokens to generate. Default: what the context has left.")
    ] = None
    max_completion_tokens: Annotated[
        Count | None, Field(description="The present name of `max_tokens`; it wins over that.")
    ] = None
    logprobs: Annotated[bool, Field(description="Give the logprobs of the tokens. Default: false.")] = False
    top_logprobs: Annotated[
        SizeOrAll | None, Field(description="With so many likeliest ones each; −1: of all tokens. Needs `logprobs`.")
    ] = None
    tool_choice: Annotated[
        ToolChoice | None,
        Field(description="`auto`; `none`: no calls; `required`, or a function: calls that fit the schemas."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: one call at most. Default: true.")] = None
    include_reasoning: Annotated[
        bool, Field(description="false: leave the reasoning out of the answer. Default: true.")
    ] = True
    stop_in_reasoning: Annotated[
        bool, Field(description="true: `stop` ends thoughts too. Default: false, it is looked for in the answer only.")
    ] = False
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Field(description="For the template: `reasoning_effort`, and `enable_thinking`, false for `none`."),
    ] = None
    safety_identifier: Annotated[Annotated[Text, _LIMITED] | None, _NOTE] = None
    # known, of features that this build does not have
    functions: Annotated[Any, not_here("OpenAI deprecates it; use tools", [], "none")] = None
    function_call: Annotated[Any, not_here("OpenAI deprecates it; use tool_choice", [], "none")] = None
    modalities: Annotated[Any, not_here("output other than text", ["text"], [])] = None
    audio: Annotated[Any, not_here("audio output")] = None
    web_search_options: Annotated[Any, not_here("web search")] = None
    verbosity: Annotated[Any, not_here("verbosity other than medium", "medium")] = None
    moderation: Annotated[Any, no_effect("answers are not moderated here")] = None
    prediction: Annotated[Any, no_effect("answers are not predicted here; it would change their speed only")] = None
    prompt_cache_key: Annotated[Any, _PROMPT_CACHE] = None
    prompt_cache_options: Annotated[Any, _PROMPT_CACHE] = None
    prompt_cache_retention: Annotated[Any, _PROMPT_CACHE] = None
    mm_processor_kwargs: Annotated[Any, _MEDIA] = None
    media_io_kwargs: Annotated[Any, _MEDIA] = None
    return_mm_kwargs: Annotated[Any, no_effect("it is for the peer's render routes", True)] = None
