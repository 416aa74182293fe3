"""Conversations as clients send them: what they may look like, and the one form of them that chat templates read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, Tag, TypeAdapter, model_validator

from ferrule.errors import RequestError
from ferrule.interfaces.service import ChatPrompt
from ferrule.schema import SomeText, Strict, Text, by_type, checked, problem, rule, shaped

_MAX_PIECES = 16_384  # messages, parts and tool calls: more cannot be meant
_MAX_TOOLS = 1024
_LONE = re.compile("[\ud800-\udfff]")
_THOUGHTS = ("reasoning", "reasoning_content", "thinking", "thought", "tool_plan")  # names that templates read

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "caller",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "conversation",
        "cycler",
        "dict",
        "documents",
        "joiner",
        "lipsum",
        "loop",
        "max_length",
        "messages",
        "namespace",
        "padding",
        "raise_exception",
        "range",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "strftime_now",
        "super",
        "template",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names of chat_template_kwargs that would replace what the server itself passes to a template or a renderer, or what
templates call."""


# ------------------------------------------------------------------------------------------------ what is sent


class TextPart(Strict):
    """A part of a message's content."""

    type: Annotated[
        Literal["text"],
        rule("must be 'text'; this model does not take parts such as image_url or input_audio"),
        Field(description="`text`: the only type that this model takes."),
    ]
    text: Annotated[Text, Field(description="The text.")]


class CalledFunction(Strict):
    """The function of a call in a message."""

    name: Annotated[Text, Field(description="Of the function that was called.")]
    arguments: Annotated[Any, Field(description="Its arguments, as a JSON text or as an object.")] = None


class MessageToolCall(Strict):
    """A call in a message of the assistant's."""

    id: Annotated[Text | None, Field(description="What the tool's answer refers to.")] = None
    type: Annotated[Text | None, Field(description="`function`.")] = None
    index: Annotated[Any, Field(description="Of a call that was put together from a stream: it is not read.")] = None
    function: Annotated[CalledFunction, Field(description="What was called.")]


Part = Annotated[Annotated[Text, Tag("<a string>")] | Annotated[TextPart, Tag("<an object>")], by_type]
Parts = Annotated[list[Part], Field(strict=False, fail_fast=True)]
Content = Annotated[Annotated[Text, Tag("<a string>")] | Annotated[Parts, Tag("<a list>")], by_type]


class ChatMessage(Strict):
    """A message. Templates may read other keys: those are kept."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[
        SomeText,
        Field(
            max_length=64,
            description="Who speaks: `system`, `user`, `assistant`, `tool` or another that the template knows.",
        ),
    ]
    content: Annotated[
        Content | None, Field(description="A text, or a list of text parts. The assistant's may have calls instead.")
    ] = None
    name: Annotated[Text | None, Field(description="Of the speaker.")] = None
    tool_calls: Annotated[
        Annotated[list[MessageToolCall], Field(strict=False, fail_fast=True)] | None,
        Field(description="Of the assistant: the calls that it made."),
    ] = None
    tool_call_id: Annotated[Text | None, Field(description="Of a tool: the call that this is the answer to.")] = None
    reasoning: Annotated[Text | None, Field(description="Of the assistant: its thoughts.")] = None
    reasoning_content: Annotated[Text | None, Field(description="The older name of `reasoning`.")] = None
    thinking: Annotated[Text | None, Field(description="Another name of `reasoning`.")] = None
    # what OpenAI's clients send back of an answer
    refusal: Annotated[Text | None, Field(description="Of the assistant: its refusal.")] = None
    annotations: Annotated[Any, Field(description="Of an answer that is sent back; for the template only.")] = None
    audio: Annotated[Any, Field(description="Of an answer that is sent back; for the template only.")] = None
    function_call: Annotated[Any, Field(description="OpenAI deprecates it; for the template only.")] = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        """Check that only the assistant's message has something else in the place of content."""
        if self.content is None and not (self.role == "assistant" and self._has_instead()):
            raise problem("is required", "content")
        return self

    def _has_instead(self) -> bool:
        thoughts = self.reasoning or self.reasoning_content or self.thinking or self.refusal
        return bool(thoughts or self.tool_calls or self.function_call or self.audio)


def _countable(messages: Any) -> Any:
    """Check that messages are few enough to be looked at one by one."""
    if not isinstance(messages, list | tuple):
        return messages
    pieces = len(messages)
    for message in messages if pieces <= _MAX_PIECES else ():
        if isinstance(message, Mapping):
            parts = (message.get("content"), message.get("tool_calls"))
            pieces += sum(len(part) for part in parts if isinstance(part, list | tuple))
    if pieces > _MAX_PIECES:
        raise problem(f"may have at most {_MAX_PIECES} messages, parts and tool calls in all")
    return messages


Conversation = Annotated[
    list[dict[str, Any]],
    shaped(
        Annotated[list[ChatMessage], Field(strict=False, fail_fast=True, min_length=1), BeforeValidator(_countable)]
    ),
]


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[SomeText, Field(description="How the model calls it.")]
    description: Annotated[Text | None, Field(description="What it does, for the model.")] = None
    parameters: Annotated[dict[str, Any] | None, Field(description="JSON Schema of its arguments.")] = None
    strict: Annotated[
        bool | None, Field(description="true: arguments fit `parameters` also where the model chooses to call.")
    ] = None


class Tool(Strict):
    """A tool that the model may use."""

    type: Annotated[Literal["function"], Field(description="`function`.")]
    function: Annotated[Function, Field(description="The function.")]


Tools = Annotated[
    list[dict[str, Any]],
    shaped(Annotated[list[Tool], Field(strict=False, fail_fast=True, min_length=1, max_length=_MAX_TOOLS)]),
]
Documents = Annotated[list[dict[str, Any]], Field(strict=False, fail_fast=True)]


class TemplateFields(Strict):
    """The fields that shape the text of a conversation, besides its messages; see `ChatPrompt`."""

    tools: Annotated[Tools | None, Field(description="Functions that the model may call.")] = None
    documents: Annotated[Documents | None, Field(description="For the template: texts to answer from.")] = None
    chat_template: Annotated[
        Text | None, Field(description="Another template. Needs `--trust-request-chat-template`.")
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="Variables for the template.")] = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="Begin a new message. Default: true, unless the final one is continued.")
    ] = None
    continue_final_message: Annotated[bool, Field(description="Go on with the last message. Default: false.")] = False
    add_special_tokens: Annotated[
        bool | None, Field(description="The tokenizer adds its own tokens. Default: false, as the template has them.")
    ] = None

    @property
    def begins_message(self) -> bool:
        """Whether the template is to begin a new message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


def chat_prompt(messages: Sequence[dict[str, Any]], fields: TemplateFields) -> ChatPrompt:
    """Return a conversation, and the fields that shape its text, as a `ChatPrompt`."""
    return ChatPrompt(
        messages=tuple(messages),
        tools=None if fields.tools is None else tuple(fields.tools),
        documents=None if fields.documents is None else tuple(fields.documents),
        chat_template=fields.chat_template,
        chat_template_kwargs=fields.chat_template_kwargs,
        add_generation_prompt=fields.begins_message,
        continue_final_message=fields.continue_final_message,
        add_special_tokens=bool(fields.add_special_tokens),
    )


# ------------------------------------------------------------------------------------------------ what templates read

_CONVERSATION: TypeAdapter[list[dict[str, Any]]] = TypeAdapter(Conversation)
_TOOLS: TypeAdapter[list[dict[str, Any]]] = TypeAdapter(Tools)
_DOCUMENTS: TypeAdapter[list[dict[str, Any]]] = TypeAdapter(Documents)


def read_messages(messages: Sequence[Any], max_characters: int) -> list[dict[str, Any]]:
    """Return messages with a role, content (a text, a list of text parts, or None) and tool calls whose arguments are
    objects.

    Other keys pass through: templates read the keys that they know. Raises RequestError naming the message.
    """
    found = checked(_CONVERSATION, messages, "messages")
    texts = _texts(found)
    characters = sum(map(len, texts))
    if characters > max_characters:
        raise RequestError(
            f"The conversation has {characters} characters; at most {max_characters} can fit this model's context.",
            "messages",
        )
    if any(map(_LONE.search, texts)):
        raise RequestError("The text holds a surrogate without its partner: that is no Unicode.", "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(found)]


def read_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return functions as templates show them. Raises RequestError naming the tool."""
    return list(checked(_TOOLS, tools, "tools"))


def read_documents(documents: Sequence[Any]) -> list[dict[str, Any]]:
    """Return documents as templates show them. Raises RequestError naming the document."""
    return list(checked(_DOCUMENTS, documents, "documents"))


def other_keys(message: Mapping[str, Any]) -> set[str]:
    """Return the keys of a message that are not documented: only a template can know them."""
    return {key for key, value in message.items() if value is not None} - ChatMessage.model_fields.keys()


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts of valid messages that will be read."""
    texts: list[Any] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            texts += [part if isinstance(part, str) else part["text"] for part in content]
        else:
            texts.append(content)
        texts += [call["function"].get("arguments") for call in message.get("tool_calls") or ()]
    return [text for text in texts if isinstance(text, str)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    read = {str(key): value for key, value in message.items() if value is not None}
    content = read.get("content", read.get("refusal"))
    if isinstance(content, list | tuple):
        content = [{"type": "text", "text": part if isinstance(part, str) else part["text"]} for part in content]
    read["content"] = content
    thoughts = next((read[name] for name in _THOUGHTS if name in read), None)
    if thoughts is not None and message.get("role") == "assistant":  # clients and templates use all of these names
        others = ("thinking",) if content else ()  # gpt-oss has thoughts or content in a message with calls
        read |= {name: thoughts for name in _THOUGHTS if name not in others}
    if "tool_calls" in read:
        read["tool_calls"] = _tool_calls(read["tool_calls"], f"{where}.tool_calls")
    return read


def _tool_calls(calls: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    read = []
    for number, call in enumerate(calls):
        function = call["function"]
        arguments = _arguments(function.get("arguments"), f"{where}[{number}].function.arguments")
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _arguments(arguments: Any, where: str) -> Any:
    """Return arguments as the object that templates want; the OpenAI form is a JSON text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        found = json.loads(arguments) if arguments.strip() else {}
        return {} if found is None else found  # some models write null for no arguments
    except (ValueError, RecursionError):
        raise RequestError(f"{where} must be a JSON text.", where) from None
