"""Bodies of the Messages routes: each field once, with its type, its bounds, and its effect, if any."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from ferrule.sampling_params import Texts
from ferrule.schema import (
    Body,
    Count,
    Number,
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
from ferrule.structured_outputs import JsonSchema

_MAX_BLOCKS = 16_384  # messages and blocks: more cannot be meant
_MAX_TOOLS = 1024
_TEXT_ONLY = "; this model takes text only, without images and documents"


class CacheControl(Strict):
    """A mark at which a prefix may be cached. The prefix cache of this server needs none."""

    type: Annotated[Literal["ephemeral"], Field(description="`ephemeral`.")]
    ttl: Annotated[Text | None, Field(description="Prefixes stay cached as long as there is room.")] = None


class _Cacheable(Body):
    cache_control: Annotated[
        CacheControl | None, Field(description="Accepted; prefixes are cached without such a mark.")
    ] = None


# ------------------------------------------------------------------------------------------------ content


class TextBlock(_Cacheable):
    """A text."""

    type: Annotated[Literal["text"], Field(description="`text`.")]
    text: Annotated[Text, Field(description="The text.")]
    citations: Annotated[Any, Field(description="Of an answer that is sent back; it is not read.")] = None


class ThinkingBlock(Body):
    """Thoughts of an answer, sent back as they came."""

    type: Annotated[Literal["thinking"], Field(description="`thinking`.")]
    thinking: Annotated[Text, Field(description="The thoughts.")]
    signature: Annotated[Text, Field(description="The signature that came with these thoughts.")]


class RedactedThinkingBlock(Body):
    """Thoughts that another server has encrypted: refused, as nothing here can read them."""

    type: Annotated[Literal["redacted_thinking"], Field(description="`redacted_thinking`.")]
    data: Annotated[Text, Field(description="This server makes no such blocks, so none is valid.")]


class ToolUseBlock(_Cacheable):
    """A call that the assistant made."""

    type: Annotated[Literal["tool_use"], Field(description="`tool_use`.")]
    id: Annotated[SomeText, Field(description="The id that the result refers to.")]
    name: Annotated[SomeText, Field(description="The tool that was called.")]
    input: Annotated[dict[str, Any], Field(description="The arguments.")]
    caller: Annotated[Any, Field(description="Of an answer that is sent back; it is not read.")] = None


_Texts = Annotated[
    list[Annotated[Annotated[TextBlock, Tag("<text>")], by_field("type", ("text",), _TEXT_ONLY)]],
    Field(strict=False, fail_fast=True),
]
TextOrBlocks = Annotated[Annotated[Text, Tag("<a string>")] | Annotated[_Texts, Tag("<a list>")], by_type]


class ToolResultBlock(_Cacheable):
    """The result of a call."""

    type: Annotated[Literal["tool_result"], Field(description="`tool_result`.")]
    tool_use_id: Annotated[SomeText, Field(description="The id of a call in the message before.")]
    content: Annotated[TextOrBlocks, Field(description="The result: a text, or a list of text blocks.")] = ""
    is_error: Annotated[
        bool, Field(description="true: the call has failed; the model sees `Error: ` before the result.")
    ] = False


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")],
    by_field("type", ("text", "tool_result"), _TEXT_ONLY),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    by_field("type", ("text", "thinking", "redacted_thinking", "tool_use"), _TEXT_ONLY),
]
_UserBlocks = Annotated[list[UserBlock], Field(strict=False, fail_fast=True)]
_AssistantBlocks = Annotated[list[AssistantBlock], Field(strict=False, fail_fast=True)]


class UserMessage(Body):
    """A message of the user's."""

    role: Annotated[Literal["user"], Field(description="`user`.")]
    content: Annotated[
        Annotated[Annotated[Text, Tag("<a string>")] | Annotated[_UserBlocks, Tag("<a list>")], by_type],
        Field(description="A text, or a list of blocks: results of calls, then texts."),
    ]


class AssistantMessage(Body):
    """A message of the assistant's."""

    role: Annotated[Literal["assistant"], Field(description="`assistant`.")]
    content: Annotated[
        Annotated[Annotated[Text, Tag("<a string>")] | Annotated[_AssistantBlocks, Tag("<a list>")], by_type],
        Field(description="A text, or a list of blocks: thoughts, texts and calls."),
    ]


MessageParam = Annotated[
    Annotated[UserMessage, Tag("<user>")] | Annotated[AssistantMessage, Tag("<assistant>")],
    by_field("role", ("user", "assistant"), "; the system prompt is the field system"),
]


def _countable(messages: Any) -> Any:
    """Check that messages and blocks are few enough to be looked at one by one."""
    if isinstance(messages, list):
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        blocks = len(messages) + sum(len(content) for content in contents if isinstance(content, list))
        if blocks > _MAX_BLOCKS:
            raise problem(f"may have at most {_MAX_BLOCKS} messages and blocks in all")
    return messages


# ------------------------------------------------------------------------------------------------ tools


class ToolParam(_Cacheable):
    """A tool that the client runs."""

    type: Annotated[
        Literal["custom"], Field(description="`custom`: tools that Anthropic's servers run are not in this build.")
    ] = "custom"
    name: Annotated[SomeText, Field(description="How the model calls it.")]
    description: Annotated[Text | None, Field(description="What it does, for the model.")] = None
    input_schema: Annotated[dict[str, Any], Field(description="JSON Schema of its arguments.")]
    strict: Annotated[
        bool | None, Field(description="true: arguments fit the schema also where the model chooses to call.")
    ] = None


class AutoChoice(Body):
    """The model decides."""

    type: Annotated[Literal["auto"], Field(description="`auto`.")]
    disable_parallel_tool_use: Annotated[bool, Field(description="true: one call at most.")] = False


class AnyChoice(Body):
    """The model must call a tool."""

    type: Annotated[Literal["any"], Field(description="`any`.")]
    disable_parallel_tool_use: Annotated[bool, Field(description="true: exactly one call.")] = False


class NamedChoice(Body):
    """The model must call this tool."""

    type: Annotated[Literal["tool"], Field(description="`tool`.")]
    name: Annotated[SomeText, Field(description="One of `tools`.")]
    disable_parallel_tool_use: Annotated[bool, Field(description="true: exactly one call.")] = False


class NoChoice(Body):
    """The model must not call."""

    type: Annotated[Literal["none"], Field(description="`none`.")]


ToolChoiceParam = Annotated[
    Annotated[AutoChoice, Tag("<auto>")]
    | Annotated[AnyChoice, Tag("<any>")]
    | Annotated[NamedChoice, Tag("<tool>")]
    | Annotated[NoChoice, Tag("<none>")],
    by_field("type", ("auto", "any", "tool", "none")),
]


# ------------------------------------------------------------------------------------------------ the rest


class ThinkingOn(Body):
    """Think within a budget."""

    type: Annotated[Literal["enabled"], Field(description="`enabled`.")]
    budget_tokens: Annotated[Count, Field(description="Most tokens of thoughts.")]


class ThinkingAdaptive(Body):
    """Think as long as the model wants to."""

    type: Annotated[Literal["adaptive"], Field(description="`adaptive`.")]


class ThinkingOff(Body):
    """Do not think."""

    type: Annotated[Literal["disabled"], Field(description="`disabled`.")]


Thinking = Annotated[
    Annotated[ThinkingOn, Tag("<enabled>")]
    | Annotated[ThinkingAdaptive, Tag("<adaptive>")]
    | Annotated[ThinkingOff, Tag("<disabled>")],
    by_field("type", ("enabled", "adaptive", "disabled")),
]


class JsonFormat(Body):
    """The answer is JSON of a schema."""

    type: Annotated[Literal["json_schema"], Field(description="`json_schema`.")]
    schema_: Annotated[JsonSchema, Field(alias="schema", description="The JSON Schema.")]


class OutputConfig(Body):
    """The form of an answer, and the effort of its thoughts."""

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Field(description="For the template: `reasoning_effort`."),
    ] = None
    format: Annotated[JsonFormat | None, Field(description="The form of the answer's text.")] = None


class Metadata(Body):
    """Labels of a request."""

    user_id: Annotated[
        Annotated[str, Field(strict=True, max_length=1024)] | None, Field(description="A note for the log.")
    ] = None


class CountBody(_Cacheable):
    """``POST /v1/messages/count_tokens``: the fields that shape the prompt. null means the same as an absent field."""

    model: Annotated[SomeText, Field(description="One of the served names.")]
    messages: Annotated[
        Annotated[list[MessageParam], Field(strict=False, fail_fast=True, min_length=1), BeforeValidator(_countable)],
        Field(description="The conversation. If the assistant's message is the last one, the answer continues it."),
    ]
    system: Annotated[TextOrBlocks | None, Field(description="The system prompt: a text or a list of texts.")] = None
    tools: Annotated[
        Annotated[list[ToolParam], Field(strict=False, fail_fast=True, max_length=_MAX_TOOLS)] | None,
        Field(description="Tools that the model may call."),
    ] = None
    tool_choice: Annotated[
        ToolChoiceParam | None,
        Field(description="Whether the model calls: `auto`, the default with tools, `any`, `tool` or `none`."),
    ] = None
    thinking: Annotated[
        Thinking | None,
        Field(description="Whether the template asks for thoughts. Default: `disabled`."),
    ] = None
    output_config: Annotated[OutputConfig | None, Field(description="Form and effort of the answer.")] = None
    # known, of features that this build does not have
    mcp_servers: Annotated[Any, not_here("calls of MCP servers", [])] = None
    context_management: Annotated[Any, no_effect("the conversation is used as it is sent", {})] = None
    speed: Annotated[Any, no_effect("there is one speed here", "standard")] = None


class MessagesBody(CountBody):
    """``POST /v1/messages``."""

    max_tokens: Annotated[
        Count, Field(description="Most tokens to generate; as much as the model's context, or more: what it has left.")
    ]
    stop_sequences: Annotated[Texts | None, Field(description="Texts that end the answer.")] = None
    stream: Annotated[bool, Field(description="Answer with server-sent events. Default: false.")] = False
    temperature: Annotated[
        Number | None, Field(ge=0, le=1e6, description="0: always the likeliest token. Default: the model's, else 1.")
    ] = None
    top_k: Annotated[SizeOrAll | None, Field(description="Draw from so many likeliest tokens. −1 and 0: off.")] = None
    top_p: Annotated[
        Number | None,
        Field(gt=0, le=1, description="Draw from the likeliest tokens that make up this share. Default: all."),
    ] = None
    metadata: Annotated[Metadata | None, Field(description="A note for the log.")] = None
    # known, of features that this build does not have
    container: Annotated[Any, not_here("containers")] = None
    service_tier: Annotated[Any, no_effect("there is one tier here", "auto", "standard_only")] = None
    inference_geo: Annotated[Any, no_effect("the server is where it is")] = None
