"""Items of the Responses routes' input: messages, thoughts, calls, their results, and references to earlier items."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from ferrule.schema import Body, SomeText, Text, by_field, by_type, problem

MAX_ITEMS = 16_384  # items and parts of a conversation, with those of earlier responses: more cannot be meant
_TEXT_ONLY = "; this model takes text only, without images, files and sound"
_BACK = Field(description="Of an item that is sent back; it is not read.")


class _Item(Body):
    id: Annotated[Text | None, Field(description="Of an item that is sent back. Others get one.")] = None
    status: Annotated[Any, _BACK] = None


class InputTextPart(Body):
    """A text of the user's, of the system's or of a tool's."""

    type: Annotated[Literal["input_text"], Field(description="`input_text`.")]
    text: Annotated[Text, Field(description="The text.")]
    prompt_cache_breakpoint: Annotated[Any, Field(description="Accepted; prefixes are cached without it.")] = None


class OutputTextPart(Body):
    """A text of the assistant's."""

    type: Annotated[Literal["output_text"], Field(description="`output_text`.")]
    text: Annotated[Text, Field(description="The text.")]
    annotations: Annotated[Any, _BACK] = None
    logprobs: Annotated[Any, _BACK] = None


class RefusalPart(Body):
    """A refusal of the assistant's."""

    type: Annotated[Literal["refusal"], Field(description="`refusal`.")]
    refusal: Annotated[Text, Field(description="The text.")]


Part = Annotated[
    Annotated[InputTextPart, Tag("<input_text>")]
    | Annotated[OutputTextPart, Tag("<output_text>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    by_field("type", ("input_text", "output_text", "refusal"), _TEXT_ONLY),
]
_Parts = Annotated[list[Part], Field(strict=False, fail_fast=True)]
TextOrParts = Annotated[Annotated[Text, Tag("<a string>")] | Annotated[_Parts, Tag("<a list>")], by_type]


class MessageItem(_Item):
    """A message."""

    type: Annotated[Literal["message"], Field(description="`message`, which may be left out.")]
    role: Annotated[
        Literal["user", "assistant", "system", "developer"],
        Field(description="`user`, `assistant`, `system` or `developer`."),
    ]
    content: Annotated[TextOrParts, Field(description="A text, or a list of texts.")]
    phase: Annotated[Any, _BACK] = None


class _PlainText(Body):
    type: Annotated[Literal["summary_text", "reasoning_text", "text"], Field(description="The sort of text.")]
    text: Annotated[Text, Field(description="The text.")]


_PlainTexts = Annotated[list[_PlainText], Field(strict=False, fail_fast=True)]


class ReasoningItem(_Item):
    """Thoughts of an answer, sent back: the template decides whether the model sees them again."""

    type: Annotated[Literal["reasoning"], Field(description="`reasoning`.")]
    summary: Annotated[_PlainTexts, Field(description="A summary; it is not read.")] = []
    content: Annotated[_PlainTexts | None, Field(description="The thoughts.")] = None
    encrypted_content: Annotated[
        Text | None, Field(description="The thoughts as `include` asked for them; they win over `content`.")
    ] = None


class CallItem(_Item):
    """A call that the assistant made."""

    type: Annotated[Literal["function_call"], Field(description="`function_call`.")]
    call_id: Annotated[SomeText, Field(description="The id that the result refers to.")]
    name: Annotated[SomeText, Field(description="The function that was called.")]
    arguments: Annotated[Text, Field(description="The arguments, as a JSON text.")]
    namespace: Annotated[Any, _BACK] = None
    caller: Annotated[Any, _BACK] = None


class ResultItem(_Item):
    """The result of a call."""

    type: Annotated[Literal["function_call_output"], Field(description="`function_call_output`.")]
    call_id: Annotated[SomeText, Field(description="The call's `call_id`.")]
    output: Annotated[TextOrParts, Field(description="The result: a text, or a list of texts.")]
    name: Annotated[Any, _BACK] = None
    namespace: Annotated[Any, _BACK] = None
    caller: Annotated[Any, _BACK] = None


class ReferenceItem(Body):
    """An item of a stored response, by its id."""

    type: Annotated[Literal["item_reference"], Field(description="`item_reference`.")]
    id: Annotated[SomeText, Field(description="The item's id.")]


_TYPES = ("message", "reasoning", "function_call", "function_call_output", "item_reference")
Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[ResultItem, Tag("<function_call_output>")]
    | Annotated[ReferenceItem, Tag("<item_reference>")],
    by_field("type", _TYPES, "; items of hosted tools are not in this build"),
]


def _typed(items: Any) -> Any:
    """Check that items and parts are few enough to be looked at one by one, and name the type where it is left out: a
    message, or a reference where there is an id alone.
    """
    if not isinstance(items, list):
        return items
    contents = [item.get("content") for item in items if isinstance(item, dict)]
    if len(items) + sum(len(content) for content in contents if isinstance(content, list)) > MAX_ITEMS:
        raise problem(f"may have at most {MAX_ITEMS} items and parts in all")
    return [_with_type(item) for item in items]


def _with_type(item: Any) -> Any:
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    given = {name for name, value in item.items() if value is not None}
    return {**item, "type": "item_reference" if given == {"id"} else "message"}


_Items = Annotated[list[Item], Field(strict=False, fail_fast=True, min_length=1), BeforeValidator(_typed)]
Input = Annotated[Annotated[Text, Tag("<a string>")] | Annotated[_Items, Tag("<a list>")], by_type]
