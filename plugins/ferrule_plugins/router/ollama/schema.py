"""Bodies of Ollama's routes: each field once, with its type, its bounds, and its effect, if any."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from ferrule.sampling_params import OneOrMoreTexts
from ferrule.schema import (
    Body,
    Int,
    Number,
    Size,
    SizeOrAll,
    SomeText,
    Text,
    TokenIds,
    by_type,
    no_effect,
    not_here,
    problem,
    rule,
)
from ferrule.structured_outputs import JsonSchema
from ferrule_protocol import Tools

_MAX_PIECES = 16_384  # messages and calls, or texts: more cannot be meant

_FIXED = no_effect("the server's own options decide how the model runs")
_TRUNCATION = no_effect("a prompt that is longer than the context is refused", False)
_LOADED = no_effect("the model stays loaded as long as the server runs", -1)
_IMAGES = not_here("images; this model takes text", [])
_DRAWING = not_here("image generation")

_NoImages = Annotated[
    list[Any],
    Field(strict=False, max_length=0),
    rule("must be empty: this model takes text, without images"),
]


class OllamaOptions(Body):
    """Options of the model. What is absent is as the model's generation config says."""

    num_predict: Annotated[
        Int | None, Field(description="Most tokens to generate; 0, −1, −2 and more than the context: what it has left.")
    ] = None
    temperature: Annotated[
        Number | None, Field(ge=0, le=1e6, description="0: always the likeliest token. Default: the model's, else 1.")
    ] = None
    top_k: Annotated[SizeOrAll | None, Field(description="Draw from so many likeliest tokens. −1 and 0: off.")] = None
    top_p: Annotated[
        Number | None,
        Field(gt=0, le=1, description="Draw from the likeliest tokens that make up this share. Default: all."),
    ] = None
    min_p: Annotated[
        Number | None,
        Field(ge=0, le=1, description="Leave out tokens below this share of the likeliest one's probability."),
    ] = None
    seed: Annotated[Int | None, Field(description="The same seed and request draw the same tokens. −1: random.")] = None
    stop: Annotated[OneOrMoreTexts | None, Field(description="Texts that end the answer.")] = None
    repeat_penalty: Annotated[
        Number | None,
        Field(ge=1e-6, le=1e6, description="Above 1: against tokens of the prompt and the answer. Default: 1."),
    ] = None
    presence_penalty: Annotated[
        Number | None, Field(ge=-2, le=2, description="Against tokens that the answer has already.")
    ] = None
    frequency_penalty: Annotated[
        Number | None, Field(ge=-2, le=2, description="The same, for each time that the token occurs.")
    ] = None
    # known, of samplers that this build does not have
    repeat_last_n: Annotated[Any, no_effect("penalties count all tokens", -1)] = None
    tfs_z: Annotated[Any, no_effect("tail-free sampling is not in this build", 1, 1.0)] = None
    typical_p: Annotated[Any, no_effect("typical sampling is not in this build", 1, 1.0)] = None
    mirostat: Annotated[Any, no_effect("Mirostat is not in this build", 0)] = None
    mirostat_tau: Annotated[Any, no_effect("Mirostat is not in this build")] = None
    mirostat_eta: Annotated[Any, no_effect("Mirostat is not in this build")] = None
    penalize_newline: Annotated[Any, no_effect("penalties count all tokens", True)] = None
    # known, of how a model is loaded
    num_ctx: Annotated[Any, no_effect("the context is as long as the server's --max-model-len")] = None
    num_keep: Annotated[Any, _TRUNCATION] = None
    num_batch: Annotated[Any, _FIXED] = None
    num_gpu: Annotated[Any, _FIXED] = None
    main_gpu: Annotated[Any, _FIXED] = None
    num_thread: Annotated[Any, _FIXED] = None
    numa: Annotated[Any, _FIXED] = None
    low_vram: Annotated[Any, _FIXED] = None
    f16_kv: Annotated[Any, _FIXED] = None
    logits_all: Annotated[Any, _FIXED] = None
    vocab_only: Annotated[Any, _FIXED] = None
    use_mmap: Annotated[Any, _FIXED] = None
    use_mlock: Annotated[Any, _FIXED] = None
    embedding_only: Annotated[Any, _FIXED] = None


Format = Annotated[
    Annotated[Literal["", "json"], Tag("<a string>")] | Annotated[JsonSchema, Tag("<an object>")], by_type
]
Think = Annotated[
    Annotated[bool, Field(strict=True), Tag("<true or false>")]
    | Annotated[Literal["low", "medium", "high", "max"], Tag("<a string>")],
    by_type,
]


class ModelBody(Body):
    """The fields that all routes with a model have. null means the same as an absent field."""

    model: Annotated[SomeText, Field(description="One of the served names, with or without `:latest`.")]
    options: Annotated[OllamaOptions | None, Field(description="How tokens are drawn.")] = None
    keep_alive: Annotated[Any, _LOADED] = None


class GenerateFields(ModelBody):
    """The fields that chat and generate have in common."""

    stream: Annotated[bool, Field(description="Answer line by line. Default: true.")] = True
    format: Annotated[
        Format | None, Field(description='The form of the answer: `"json"`, or a JSON schema. `""`: any.')
    ] = None
    think: Annotated[
        Think | None,
        Field(description="Whether the model thinks first, or how much: `low`, `medium`, `high`, `max`."),
    ] = None
    logprobs: Annotated[bool, Field(description="Give the logprobs of the tokens. Default: false.")] = False
    top_logprobs: Annotated[Size | None, Field(description="With so many likeliest tokens each. Needs `logprobs`.")] = (
        None
    )
    truncate: Annotated[Any, _TRUNCATION] = None
    shift: Annotated[Any, no_effect("an answer ends where the context is full", False)] = None


# ------------------------------------------------------------------------------------------------ chat


class OllamaCalledFunction(Body):
    """The function of a call that the assistant made."""

    name: Annotated[SomeText, Field(description="Of the function.")]
    arguments: Annotated[dict[str, Any], Field(description="Its arguments.")] = {}
    index: Annotated[Any, Field(description="Of an answer that is sent back; it is not read.")] = None
    description: Annotated[Any, Field(description="It is not read.")] = None


class OllamaMessageCall(Body):
    """A call that the assistant made."""

    id: Annotated[Text | None, Field(description="What `tool_call_id` of the result refers to.")] = None
    type: Annotated[Any, Field(description="`function`; it is not read.")] = None
    function: Annotated[OllamaCalledFunction, Field(description="What was called.")]


class OllamaMessage(Body):
    """A message of a conversation."""

    role: Annotated[SomeText, Field(max_length=64, description="Who speaks: `system`, `user`, `assistant` or `tool`.")]
    content: Annotated[Text, Field(description="The text.")] = ""
    thinking: Annotated[Text | None, Field(description="Of the assistant: its thoughts.")] = None
    images: Annotated[_NoImages | None, Field(description="Images are not in this build.")] = None
    tool_calls: Annotated[
        Annotated[list[OllamaMessageCall], Field(strict=False, fail_fast=True)] | None,
        Field(description="Of the assistant: the calls that it made."),
    ] = None
    tool_name: Annotated[Text | None, Field(description="Of a tool: the function whose result this is.")] = None
    tool_call_id: Annotated[Text | None, Field(description="Of a tool: the call whose result this is.")] = None


def _countable(messages: Any) -> Any:
    """Check that messages and calls are few enough to be looked at one by one."""
    if isinstance(messages, list):
        calls = [message.get("tool_calls") for message in messages if isinstance(message, dict)]
        if len(messages) + sum(len(some) for some in calls if isinstance(some, list)) > _MAX_PIECES:
            raise problem(f"may have at most {_MAX_PIECES} messages and calls in all")
    return messages


def _or_none(tools: Any) -> Any:
    """Return None for an empty list, which is what Ollama's client sends where there are no tools."""
    return None if tools == [] else tools


class OllamaChatBody(GenerateFields):
    """``POST /api/chat``."""

    messages: Annotated[
        Annotated[list[OllamaMessage], Field(strict=False, fail_fast=True), BeforeValidator(_countable)],
        Field(
            description="The conversation; none: the answer is empty. If the assistant's message is the last one, the "
            "answer continues it."
        ),
    ] = []
    tools: Annotated[
        Tools | None, BeforeValidator(_or_none), Field(description="Functions that the model may call.")
    ] = None


# ------------------------------------------------------------------------------------------------ generate


class OllamaGenerateBody(GenerateFields):
    """``POST /api/generate``."""

    prompt: Annotated[Text, Field(description="What the user says; empty: the answer is empty.")] = ""
    system: Annotated[Text | None, Field(description="The system prompt.")] = None
    context: Annotated[
        TokenIds | None, Field(description="The `context` of an earlier answer, which this prompt follows.")
    ] = None
    raw: Annotated[bool, Field(description="true: the prompt is all that the model sees. Default: false.")] = False
    suffix: Annotated[
        Text | None, Field(description="What follows the answer. Needs a model with tokens to fill in the middle.")
    ] = None
    template: Annotated[Any, not_here("templates of requests; --chat-template gives the server one", "")] = None
    images: Annotated[Any, _IMAGES] = None
    width: Annotated[Any, _DRAWING] = None
    height: Annotated[Any, _DRAWING] = None
    steps: Annotated[Any, _DRAWING] = None


# ------------------------------------------------------------------------------------------------ the rest


class OllamaShowBody(Body):
    """``POST /api/show``."""

    model: Annotated[SomeText | None, Field(description="One of the served names.")] = None
    name: Annotated[SomeText | None, Field(description="The older name of `model`.")] = None
    verbose: Annotated[Any, no_effect("vocabularies are not shown", False)] = None


class OllamaEmbedBody(ModelBody):
    """``POST /api/embed``."""

    input: Annotated[
        Annotated[Text, Tag("<a string>")]
        | Annotated[list[Text], Field(strict=False, fail_fast=True, max_length=_MAX_PIECES), Tag("<a list>")],
        by_type,
        Field(description="A text, or a list of texts."),
    ]
    truncate: Annotated[
        bool, Field(description="Use the beginning of a text that is too long; false: refuse it. Default: true.")
    ] = True
    dimensions: Annotated[
        Size | None, Field(description="Keep so many numbers of each vector, and normalise it again. 0: all.")
    ] = None
    options: Annotated[Any, no_effect("vectors are not sampled", {})] = None


class OllamaEmbeddingsBody(ModelBody):
    """``POST /api/embeddings``, the older route."""

    prompt: Annotated[Text, Field(description="A text.")] = ""
    options: Annotated[Any, no_effect("vectors are not sampled", {})] = None
