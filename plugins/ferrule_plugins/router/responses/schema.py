"""Bodies of the Responses routes: each field once, with its type, its bounds, and its effect, if any."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, Tag, model_validator

from ferrule.sampling_params import OneOrMoreTexts
from ferrule.schema import (
    Body,
    CacheSalt,
    Count,
    Int,
    Number,
    Priority,
    RequestId,
    SizeOrAll,
    SomeText,
    Strict,
    Text,
    by_field,
    by_type,
    no_effect,
    not_here,
    problem,
)
from ferrule.structured_outputs import JsonSchema, StructuredOutputs
from ferrule_plugins.router.responses.items import Input

MAX_TOOLS = 1024
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_PROMPT_CACHE = no_effect("prefixes are cached for everybody alike; cache_salt keeps them apart")
_HOSTED = "; hosted tools such as web_search do not run here: describe a function, and run it in the client"
_NO_CHOICE_OF_HOSTED = "; hosted tools do not run here"
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512


# ------------------------------------------------------------------------------------------------ tools


class FunctionTool(Body):
    """A function that the client runs."""

    type: Annotated[Literal["function"], Field(description="`function`.")]
    name: Annotated[SomeText, Field(description="How the model calls it.")]
    description: Annotated[Text | None, Field(description="What it does, for the model.")] = None
    parameters: Annotated[dict[str, Any] | None, Field(description="JSON Schema of its arguments.")] = None
    strict: Annotated[
        bool | None, Field(description="true: arguments fit `parameters` also where the model chooses to call.")
    ] = None


Tool = Annotated[Annotated[FunctionTool, Tag("<function>")], by_field("type", ("function",), _HOSTED)]


class FunctionChoice(Body):
    """A function, by its name."""

    type: Annotated[Literal["function"], Field(description="`function`.")]
    name: Annotated[SomeText, Field(description="One of `tools`.")]


class AllowedTools(Body):
    """Some of the tools: the others count as absent."""

    type: Annotated[Literal["allowed_tools"], Field(description="`allowed_tools`.")]
    mode: Annotated[Literal["auto", "required"], Field(description="Whether the model must call one of them.")]
    tools: Annotated[
        list[Annotated[Annotated[FunctionChoice, Tag("<function>")], by_field("type", ("function",), _HOSTED)]],
        Field(strict=False, fail_fast=True, min_length=1, max_length=MAX_TOOLS, description="Which ones."),
    ]


_ObjectChoice = Annotated[
    Annotated[FunctionChoice, Tag("<function>")] | Annotated[AllowedTools, Tag("<allowed_tools>")],
    by_field("type", ("function", "allowed_tools"), _NO_CHOICE_OF_HOSTED),
]
ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<a string>")] | Annotated[_ObjectChoice, Tag("<an object>")],
    by_type,
]


# ------------------------------------------------------------------------------------------------ text and thoughts


class AnyTextFormat(Body):
    """Any text."""

    type: Annotated[Literal["text"], Field(description="`text`.")]


class JsonObjectText(Body):
    """A JSON object."""

    type: Annotated[Literal["json_object"], Field(description="`json_object`.")]


class JsonSchemaText(Body):
    """JSON that follows a schema."""

    type: Annotated[Literal["json_schema"], Field(description="`json_schema`.")]
    name: Annotated[Text | None, Field(description="Of the schema; it changes nothing.")] = None
    description: Annotated[Text | None, Field(description="Of the schema; the model does not see it.")] = None
    schema_: Annotated[JsonSchema, Field(alias="schema", description="The JSON Schema.")]
    strict: Annotated[bool | None, Field(description="The schema is enforced in any case.")] = None


class TextConfig(Body):
    """The form of the answer's text."""

    format: Annotated[
        Annotated[
            Annotated[AnyTextFormat, Tag("<text>")]
            | Annotated[JsonObjectText, Tag("<json_object>")]
            | Annotated[JsonSchemaText, Tag("<json_schema>")],
            by_field("type", ("text", "json_object", "json_schema")),
        ]
        | None,
        Field(description="`text`, `json_object` or `json_schema`."),
    ] = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, Field(description="For the template: `verbosity`.")
    ] = None


class ReasoningConfig(Body):
    """The effort that the model is to spend on thoughts."""

    effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Field(description="For the template: `reasoning_effort`, and `enable_thinking`, false for `none`."),
    ] = None
    summary: Annotated[Any, no_effect("thoughts are not summarised here; the item has them whole")] = None
    generate_summary: Annotated[Any, no_effect("thoughts are not summarised here; the item has them whole")] = None
    context: Annotated[Any, no_effect("the template decides which thoughts the model sees again", "auto")] = None
    mode: Annotated[Any, no_effect("there is one mode here", "standard")] = None


class ResponseStreamOptions(Strict):
    """Options of a stream."""

    include_obfuscation: Annotated[Any, no_effect("no padding is sent in any case", False)] = None


# ------------------------------------------------------------------------------------------------ the rest


def _labels(values: dict[str, str]) -> dict[str, str]:
    if len(values) > _MAX_PAIRS:
        raise problem(f"may have at most {_MAX_PAIRS} keys")
    if any(len(key) > _MAX_KEY for key in values):
        raise problem(f"may have keys of at most {_MAX_KEY} characters")
    if any(len(value) > _MAX_VALUE for value in values.values()):
        raise problem(f"may have values of at most {_MAX_VALUE} characters")
    return values


Metadata = Annotated[dict[str, Text], AfterValidator(_labels)]
_Label = Annotated[str, Field(strict=True, max_length=1024)]
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TokensBody(Body):
    """``POST /v1/responses/input_tokens``: the fields that shape the prompt. null means the same as an absent field."""

    model: Annotated[Text | None, Field(description="One of the served names. Default: the first.")] = None
    input: Annotated[Input | None, Field(description="What comes next: a text of the user's, or a list of items.")] = (
        None
    )
    instructions: Annotated[
        Text | None, Field(description="The system prompt, of this response alone: the next one has its own.")
    ] = None
    previous_response_id: Annotated[
        SomeText | None, Field(description="A stored response, with which the conversation so far ends.")
    ] = None
    tools: Annotated[
        Annotated[list[Tool], Field(strict=False, fail_fast=True, max_length=MAX_TOOLS)] | None,
        Field(description="Functions that the model may call."),
    ] = None
    tool_choice: Annotated[
        ToolChoice | None,
        Field(
            description="`auto`, the default with tools; `none`; `required`, a function, or `allowed_tools`: calls "
            "that fit the schemas."
        ),
    ] = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: one call at most. Default: true.")] = None
    text: Annotated[TextConfig | None, Field(description="The form of the answer's text.")] = None
    reasoning: Annotated[ReasoningConfig | None, Field(description="How much the model is to think.")] = None
    truncation: Annotated[
        Literal["auto", "disabled"],
        Field(description="`auto`: drop what is oldest until the conversation fits. Default: `disabled`, an error."),
    ] = "disabled"
    # known, of features that this build does not have
    conversation: Annotated[Any, not_here("stored conversations; previous_response_id continues a response")] = None
    personality: Annotated[Any, no_effect("models here have no presets of style")] = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.input is None and self.previous_response_id is None:
            raise problem("is required", "input")
        return self


class ResponsesBody(TokensBody):
    """``POST /v1/responses``."""

    max_output_tokens: Annotated[
        Count | None,
        Field(description="Most tokens to generate, thoughts included. Default: what the context has left."),
    ] = None
    temperature: Annotated[
        Number | None, Field(ge=0, le=1e6, description="0: always the likeliest token. Default: the model's, else 1.")
    ] = None
    top_p: Annotated[
        Number | None,
        Field(gt=0, le=1, description="Draw from the likeliest tokens that make up this share. Default: all."),
    ] = None
    top_logprobs: Annotated[
        SizeOrAll | None,
        Field(description=f"Logprobs have so many likeliest tokens each. Needs `include` with `{LOGPROBS}`."),
    ] = None
    include: Annotated[
        list[Include] | None,
        Field(description=f"More to be told: `{LOGPROBS}`; `{ENCRYPTED}`, the thoughts in a form to send back."),
    ] = None
    stream: Annotated[bool, Field(description="Answer with server-sent events. Default: false.")] = False
    stream_options: Annotated[ResponseStreamOptions | None, Field(description="Needs `stream`.")] = None
    store: Annotated[bool, Field(description="Keep the response, to be read or continued later. Default: true.")] = True
    background: Annotated[
        bool, Field(description="Answer at once, and go on without the client. Needs `store`. Default: false.")
    ] = False
    metadata: Annotated[
        Metadata | None, Field(description="Up to 16 labels, which the response repeats: keys of 64, values of 512.")
    ] = None
    user: Annotated[_Label | None, Field(description="A note for the log.")] = None
    safety_identifier: Annotated[_Label | None, Field(description="A note for the log.")] = None
    # beyond OpenAI's
    top_k: Annotated[SizeOrAll | None, Field(description="Draw from so many likeliest tokens. −1 and 0: off.")] = None
    min_p: Annotated[
        Number | None,
        Field(ge=0, le=1, description="Leave out tokens below this share of the likeliest one's probability. 0: off."),
    ] = None
    seed: Annotated[
        Int | None, Field(description="The same seed and request draw the same tokens. −1 or absent: a random one.")
    ] = None
    stop: Annotated[OneOrMoreTexts | None, Field(description="Texts that end the answer; they are not part of it.")] = (
        None
    )
    presence_penalty: Annotated[
        Number | None, Field(ge=-2, le=2, description="Against tokens that the answer has already. Default: 0.")
    ] = None
    frequency_penalty: Annotated[
        Number | None, Field(ge=-2, le=2, description="The same, for each time that the token occurs. Default: 0.")
    ] = None
    repetition_penalty: Annotated[
        Number | None,
        Field(ge=1e-6, le=1e6, description="Above 1: against tokens of the prompt and the answer. Default: 1."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="The form of the output, with options of JSON.")
    ] = None
    priority: Annotated[
        Priority, Field(description="Lower runs first; 0 by default. Needs `--scheduling-policy priority`.")
    ] = 0
    request_id: Annotated[RequestId | None, Field(description="End of the response's `id`. Default: a random one.")] = (
        None
    )
    cache_salt: Annotated[
        CacheSalt | None, Field(description="Share cached prefixes only with requests of the same salt.")
    ] = None
    # known, of features that this build does not have
    prompt: Annotated[Any, not_here("stored prompts; send input and instructions")] = None
    previous_input_messages: Annotated[Any, not_here("vLLM's own form of a conversation; send input")] = None
    context_management: Annotated[Any, no_effect("the conversation is used as it is sent", [])] = None
    max_tool_calls: Annotated[Any, no_effect("it counts calls of hosted tools, of which there are none")] = None
    moderation: Annotated[Any, no_effect("answers are not moderated here")] = None
    image: Annotated[Any, no_effect("this model takes text only", {})] = None
    access_programs: Annotated[Any, no_effect("there are none here", {})] = None
    service_tier: Annotated[Any, no_effect("there is one tier here; priority orders requests", "auto", "default")] = (
        None
    )
    prompt_cache_key: Annotated[Any, _PROMPT_CACHE] = None
    prompt_cache_options: Annotated[Any, _PROMPT_CACHE] = None
    prompt_cache_retention: Annotated[Any, _PROMPT_CACHE] = None
    enable_response_messages: Annotated[Any, no_effect("return_token_ids of chat completions shows tokens", False)] = (
        None
    )
    mm_processor_kwargs: Annotated[Any, no_effect("this model takes text only", {})] = None
    kv_transfer_params: Annotated[Any, no_effect("no KV connector runs here", {})] = None
