"""Answers of the routes: whole ones, and the events of a stream.

What is sent is plain dicts, and these types are what the OpenAPI document tells of them.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

from ferrule_protocol import Extension

Finish = Literal["length", "eos_token", "stop_sequence"]


class PromptToken(TypedDict):
    """A token of the prompt. The first one has no log-probability."""

    id: int
    text: str
    logprob: float | None


class Token(TypedDict):
    """A token of the answer. The texts of those that are not `special` make up the text of the answer."""

    id: int
    text: str
    logprob: float
    special: bool


class Sequence(TypedDict):
    """The details of one generated text, and the text itself in `best_of_sequences`."""

    generated_text: NotRequired[str]
    finish_reason: Finish
    generated_tokens: int
    seed: int | None
    prefill: list[PromptToken]
    tokens: list[Token]
    top_tokens: NotRequired[list[list[Token]]]
    best_of_sequences: NotRequired[list[Sequence]]


class Generated(TypedDict):
    """A whole answer."""

    generated_text: str
    details: NotRequired[Sequence]
    ferrule: NotRequired[Extension]


class StreamDetails(TypedDict):
    finish_reason: Finish
    generated_tokens: int
    input_length: int
    seed: int | None


class TokenEvent(TypedDict):
    """A token of a stream. The last one has the whole text, and the `details` that were asked for."""

    index: int
    token: Token
    top_tokens: NotRequired[list[Token]]
    generated_text: str | None
    details: StreamDetails | None
    ferrule: NotRequired[Extension]  # on the first event


class Info(TypedDict):
    """Facts about the server and its model."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str
    max_best_of: int
    max_input_tokens: int
    max_total_tokens: int
    router: str
    version: str
