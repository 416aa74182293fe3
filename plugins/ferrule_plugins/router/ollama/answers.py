"""Answers of Ollama's routes: whole ones, and the lines of a stream, which have the same form.

As with chat completions, what is sent is plain dicts, and these types are what the OpenAPI document tells of them.
Durations are nanoseconds.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

from ferrule_protocol import Extension


class OllamaCallFunction(TypedDict):
    """The function of a call."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(TypedDict):
    """A call of a tool, always whole."""

    id: str
    function: OllamaCallFunction


class OllamaSaidMessage(TypedDict):
    """The message of a whole answer, or what a line of a stream adds to it."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class OllamaTopLogprob(TypedDict):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTopLogprob):
    """A token of the answer, with the likeliest ones in its place."""

    top_logprobs: list[OllamaTopLogprob]


class Answered(TypedDict):
    """The fields of every answer, and of every line. The figures come with `done`."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    logprobs: NotRequired[list[OllamaLogprob]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    ferrule: NotRequired[Extension]  # in a stream, on its first line


class OllamaChatAnswer(Answered):
    """An answer of ``/api/chat``."""

    message: OllamaSaidMessage


class OllamaGenerateAnswer(Answered):
    """An answer of ``/api/generate``. `context` are the tokens of the prompt and of the answer."""

    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]


class OllamaModelDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListedModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaModelDetails


class OllamaRunningModel(TypedDict):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaListedModels(TypedDict):
    models: list[OllamaListedModel]


class OllamaRunningModels(TypedDict):
    models: list[OllamaRunningModel]


class OllamaShownModel(TypedDict):
    """A description of a model. `template` is there with ``--enable-tokenizer-info-endpoint``."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    ferrule: NotRequired[Extension]


class OllamaEmbedded(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    ferrule: NotRequired[Extension]


class OllamaEmbedding(TypedDict):
    embedding: list[float]
    ferrule: NotRequired[Extension]


class OllamaVersion(TypedDict):
    """`version` is that of Ollama whose protocol is spoken, `ferrule` the server's."""

    version: str
    ferrule: str
