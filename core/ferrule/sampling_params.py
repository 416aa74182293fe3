"""How a request samples: the same model for HTTP bodies and for Python callers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, InstanceOf, JsonValue, PlainValidator, Tag, model_validator

from ferrule.forms import GrammarSpec
from ferrule.schema import (
    Arguments,
    Count,
    Int,
    Number,
    Size,
    SizeOrAll,
    SomeText,
    Strict,
    TokenIds,
    by_type,
    problem,
)
from ferrule.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

Texts = Annotated[list[SomeText], Field(strict=False, fail_fast=True)]
OneOrMoreTexts = Annotated[Annotated[SomeText, Tag("<a string>")] | Annotated[Texts, Tag("<a list>")], by_type]


def _biases(values: Any) -> dict[int, float]:
    """Check biases by token id all at once: there may be one for each token of a vocabulary."""
    if not isinstance(values, Mapping):
        raise problem("must map token ids to numbers")
    try:
        finite = set(map(type, values.values())) <= {int, float} and all(map(math.isfinite, values.values()))
    except OverflowError:  # an integer that no float holds
        finite = False
    if not finite:
        raise problem("must hold finite numbers only")
    if not set(map(type, values)) <= {int}:
        raise problem("must have token ids as keys")
    return {token: float(bias) for token, bias in values.items()}


Biases = Annotated[dict[int, float], PlainValidator(_biases, json_schema_input_type=dict[str, float])]
LengthPenalty = Annotated[Number, Field(ge=-10, le=10)]


class RequestOutputKind(Enum):
    """The content of each output of a running request, with `AsyncLLM.generate` and `LLMEngine.step`."""

    CUMULATIVE = 0  # all that was generated so far
    DELTA = 1  # what was generated since the last output
    FINAL_ONLY = 2  # there is one output, when all is there


def _functions(values: Any) -> tuple[Callable[..., Any], ...]:
    if not isinstance(values, list | tuple) or not all(map(callable, values)):
        raise problem("must be a list of functions")
    return tuple(values)


Functions = Annotated[tuple[Callable[..., Any], ...], PlainValidator(_functions, json_schema_input_type=list[Any])]


class SamplingFields(Strict):
    """The fields that completions, chat and Python callers have in common, with the documented names, meanings and
    defaults.
    """

    n: Annotated[Count, Field(description="Answers for each prompt. Default: 1.")] = 1
    best_of: Annotated[
        Count | None,
        Field(
            description="Generate so many, return the `n` whose tokens have the highest sum of logprobs. At least `n`."
        ),
    ] = None
    presence_penalty: Annotated[
        Number, Field(ge=-2, le=2, description="Against tokens that the answer has already. Default: 0.")
    ] = 0.0
    frequency_penalty: Annotated[
        Number, Field(ge=-2, le=2, description="The same, for each time that the token occurs. Default: 0.")
    ] = 0.0
    # Up to a million: float32 divides and multiplies logits by these numbers without running out of range.
    repetition_penalty: Annotated[
        Number,
        Field(ge=1e-6, le=1e6, description="Above 1: against tokens of the prompt and the answer. Default: 1."),
    ] = 1.0
    temperature: Annotated[
        Number,
        Field(
            ge=0,
            le=1e6,
            description="0: always the likeliest token; higher: more varied. Default: the model's, else 1.",
        ),
    ] = 1.0
    top_p: Annotated[
        Number,
        Field(gt=0, le=1, description="Draw from the likeliest tokens that make up this share. Default: all."),
    ] = 1.0
    top_k: Annotated[SizeOrAll, Field(description="Draw from so many likeliest tokens. −1 and 0: off.")] = -1
    min_p: Annotated[
        Number,
        Field(ge=0, le=1, description="Leave out tokens below this share of the likeliest one's probability. 0: off."),
    ] = 0.0
    seed: Annotated[
        Int | None, Field(description="The same seed and request draw the same tokens. −1 or absent: a random one.")
    ] = None
    stop: Annotated[OneOrMoreTexts | None, Field(description="Texts that end the answer; they are not part of it.")] = (
        None
    )
    stop_token_ids: Annotated[TokenIds | None, Field(description="Tokens that end the answer.")] = None
    bad_words: Annotated[Texts | None, Field(description="Words that the answer must not have.")] = None
    include_stop_str_in_output: Annotated[
        bool, Field(description="Keep the stop text in the answer. Default: false.")
    ] = False
    ignore_eos: Annotated[
        bool, Field(description="Go on after the end-of-sequence token, up to `max_tokens`. Default: false.")
    ] = False
    max_tokens: Annotated[Count | None, Field(description="Most tokens to generate.")] = 16
    thinking_token_budget: Annotated[
        SizeOrAll | None,
        Field(
            description="Most tokens of reasoning: then it is ended, and the answer follows. Default: −1, no limit. "
            "Needs `--reasoning-parser`."
        ),
    ] = None
    min_tokens: Annotated[Size, Field(description="No end before so many tokens. Default: 0.")] = 0
    prompt_logprobs: Annotated[
        SizeOrAll | None,
        Field(description="Logprobs of the prompt's tokens, with so many likeliest ones each. Not with `stream`."),
    ] = None
    skip_special_tokens: Annotated[bool, Field(description="Leave special tokens out of the text. Default: true.")] = (
        True
    )
    spaces_between_special_tokens: Annotated[
        bool,
        Field(description="Keep spaces between special tokens, with `skip_special_tokens: false`. Default: true."),
    ] = True
    truncate_prompt_tokens: Annotated[
        SizeOrAll | None, Field(description="Keep so many tokens of the prompt; −1: as many as fit.")
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"],
        Field(description="Where `truncate_prompt_tokens` cuts: `left`, the default, keeps the last tokens."),
    ] = "left"
    logit_bias: Annotated[
        Biases | None, Field(description="Added to logits: token id → −100 to 100, beyond it is cut.")
    ] = None
    allowed_token_ids: Annotated[
        Annotated[TokenIds, Field(min_length=1)] | None, Field(description="No other tokens may be generated.")
    ] = None


class SamplingParams(SamplingFields, Arguments):
    """Parameters by which one request samples. Public: ``from ferrule import SamplingParams``.

    A wrong value or an unknown name is a RequestError that names the field. Values that depend on the model and on the
    server's limits are checked when the request is admitted.
    """

    max_tokens: Annotated[
        Count | None, Field(description="Most tokens to generate; None: what the context has left.")
    ] = 16
    logprobs: Annotated[
        SizeOrAll | None, Field(description="None: off; k: the sampled token's and the k most likely ones'.")
    ] = None
    detokenize: Annotated[bool, Field(description="False: token ids only, no text.")] = True
    output_kind: Annotated[
        RequestOutputKind, Field(description="What outputs of a running request have. LLM returns finished ones only.")
    ] = RequestOutputKind.CUMULATIVE
    logits_processors: Annotated[
        Functions | None,
        Field(
            description="Functions (output_ids, logits) or (prompt_ids, output_ids, logits) that return the changed "
            "logits [vocab]. They run on the engine's thread for each token of each answer."
        ),
    ] = None
    extra_args: Annotated[
        dict[str, JsonValue] | None,
        Field(
            description="Plain data for plugins: samplers and schedulers read it in `TokenSampling.extra_args`, hooks "
            "in the parameters of `request_admitted`. Nothing that is built in reads it."
        ),
    ] = None
    structured_outputs: Annotated[
        InstanceOf[StructuredOutputsParams] | None, Field(description="The form of the output, for offline use.")
    ] = None
    guided_decoding: Annotated[
        InstanceOf[GuidedDecodingParams] | None, Field(description="The same, with a choice of the backend.")
    ] = None

    @model_validator(mode="after")
    def _state_one_form(self) -> Self:
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise problem("cannot be combined with structured_outputs", "guided_decoding")
        return self

    @property
    def grammar(self) -> GrammarSpec | None:
        """The constraint that these parameters state; HTTP requests state theirs outside of them."""
        stated = self.structured_outputs or self.guided_decoding
        return None if stated is None else stated.spec()


class Beam(Arguments):
    """Beam search instead of sampling. A finished beam scores sum of logprobs / generated tokens ** length_penalty.

    Of a step's `width` best beams those that end have finished; the best of the others go on. Once `width` have
    finished the search ends: at once with `early_stopping`, else when the best running beam, by its present length,
    does not beat the worst of them. That is what transformers does with ``early_stopping`` True and False.
    """

    width: Count
    length_penalty: LengthPenalty = 1.0
    early_stopping: bool = False
